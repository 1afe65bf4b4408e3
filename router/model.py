"""Model: one served model, as the router sees it: its text side, its requests, its versions."""

from __future__ import annotations

from dataclasses import dataclass

from common.errors import ContextTooLong, InvalidRequest, Unavailable
from router.placement.models import ModelVersions
from router.streams.room_requests import RoomRequests
from router.text.sampling_defaults import SamplingDefaults
from router.text.tokenization import Tokenization


@dataclass(frozen=True, slots=True)
class Model:
    """Each model has its own tokenizer, chat template, workers and queues."""

    name: str
    tokenization: Tokenization
    sampling_defaults: SamplingDefaults
    requests: RoomRequests
    versions: ModelVersions

    def room_for(self, prompt: list[int], wanted: int | None, param: str) -> int:
        """How many output tokens a prompt may have: `wanted`, or what the context leaves.

        Raises InvalidRequest for an empty prompt, ContextTooLong for one that does not fit.
        """
        if not prompt:
            raise InvalidRequest("the prompt is empty", param)
        limit = self.versions.context_limit
        if limit is None:
            if wanted is None:
                raise Unavailable("no worker has said yet how long an answer may be")
            return wanted  # a worker that comes within the wait will judge
        if len(prompt) + (wanted if wanted is not None else 1) > limit:
            raise ContextTooLong(len(prompt) + (wanted if wanted is not None else 1), limit, param)
        return wanted if wanted is not None else limit - len(prompt)
