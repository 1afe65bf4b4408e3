"""/v1/embeddings: a text as one vector, pooled from what a decoder's last layer says of it."""

from __future__ import annotations

import base64
import time
from typing import Any, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace
from pydantic import Field

from common.errors import InvalidRequest, RequestFailed
from router.api.answering import encode_prompts, generating, make_submission
from router.api.asgi import HttpRequest
from router.api.collection import Collection
from router.api.request_body import MOST_INPUTS, Inputs, Label, RequestBody, SamplingBody, parse
from router.service import Router
from router.streams.assignments import Assignment
from wire.request import Pooling

_AT_ONCE = 64  # texts of a request whose rooms run together; the next ones follow when they are over


class EmbeddingBody(RequestBody):
    """POST /v1/embeddings."""

    model: Label | None = None
    input: Inputs
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = Field(None, ge=1, description="of a vector: its first ones, of length 1 again")
    pooling: Literal["last", "mean"] | None = Field(
        None, description="the last token's hidden state, or the mean of all tokens'; default: `--pooling`"
    )
    normalize: bool = Field(True, description="to length 1")
    add_special_tokens: bool = True
    stream: Literal[False] = Field(False, description="only false")


async def embeddings(router: Router, request: HttpRequest) -> None:
    """POST /v1/embeddings."""
    body = parse(EmbeddingBody, await request.json())
    model = router.model(body.model)
    prompts = await encode_prompts(model, body.input, "input", 1, body.add_special_tokens, most=MOST_INPUTS)
    for prompt in prompts:
        model.room_for(prompt, 1, "input")
    pooling = body.pooling or router.options.pooling
    params = SamplingBody(temperature=0.0)  # workers compute one token at least
    sampling = replace(params.sampling(1, None, model, None), pooling=Pooling(pooling))
    data: list[msgspec.Raw] = []  # Python's floats of 2048 vectors would take 250 MiB
    assignment: Assignment | None = None
    for first in range(0, len(prompts), _AT_ONCE):
        part = prompts[first : first + _AT_ONCE]
        submission = await make_submission(router, model, request, body, params, part, sampling)
        if assignment is None:
            assignment = router.assign(submission)
        else:
            assignment = assignment.next_part()
            # It has a trace of its own, and its times count from now.
            named = f"{request.request_id}-{first // _AT_ONCE + 1}"
            submission = replace(submission, request_id=named, arrived_ns=time.time_ns())
        collection = Collection(len(part))
        with generating(router, request, submission, assignment, collection) as generation:
            while await generation.more():
                pass
            if generation.abandoned:
                return
            for index, choice in enumerate(collection.choices, first):
                entry = {"object": "embedding", "index": index, "embedding": _embedding(body, choice.pooled)}
                data.append(msgspec.Raw(msgspec.json.encode(entry)))
    tokens = sum(map(len, prompts))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    await request.respond_json({"object": "list", "data": data, "model": model.name, "usage": usage})


def _embedding(body: EmbeddingBody, pooled: bytes | None) -> Any:
    """Raises InvalidRequest for more dimensions than there are, and RequestFailed if the worker was lost."""
    if pooled is None:
        raise RequestFailed("a vector was lost with its worker: ask again")
    vector = np.frombuffer(pooled, dtype="<f4")
    if body.dimensions is not None:
        if body.dimensions > len(vector):
            raise InvalidRequest(f"this model's vectors have {len(vector)} dimensions", "dimensions")
        vector = vector[: body.dimensions]
    if body.normalize:
        vector = _normalized(vector)
    if body.encoding_format == "base64":
        return base64.b64encode(vector.tobytes()).decode()
    return vector.tolist()


def _normalized(vector: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """A vector of zeros stays one."""
    wide = vector.astype(np.float64)
    return (wide / max(float(np.linalg.norm(wide)), 1e-12)).astype("<f4")
