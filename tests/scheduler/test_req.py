"""Requests that are refused when their message arrives."""

from __future__ import annotations

import math

import pytest

from common.errors import ContextTooLong, InvalidRequest
from scheduler.req import Req, RequestLimits
from tests.scheduler.rig import VOCAB, Rig
from wire.codec import pack_tokens
from wire.request import GenerateRequest, SamplingParams


@pytest.mark.parametrize("bad", [-1, VOCAB, 1 << 63])
@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_sampling_with_ids_outside_the_vocabulary_is_refused(field: str, bad: int) -> None:
    value = {3: 1.0, bad: 2.0} if field == "logit_bias" else (3, bad)
    with pytest.raises(InvalidRequest, match=field) as refused:
        Rig().req([1, 2, 3], **{field: value})
    assert refused.value.param == field


@pytest.mark.parametrize(
    ("field", "bad"),
    [
        ("temperature", math.nan), ("temperature", math.inf), ("temperature", -0.1), ("top_p", 1.1),
        ("min_p", math.nan), ("presence_penalty", -2.1), ("frequency_penalty", math.inf),
        ("repetition_penalty", 0.0), ("repetition_penalty", 1e30), ("logit_bias", {3: math.inf}),
        ("logit_bias", {3: 1.0, 4: math.nan}), ("logit_bias", {3: -100.5}), ("top_k", -2), ("seed", -1),
        ("min_tokens", -1), ("top_logprobs", -1), ("top_logprobs", 21),
    ],
)  # fmt: skip
def test_sampling_that_a_router_would_refuse_is_refused_here_too(field: str, bad: object) -> None:
    with pytest.raises(InvalidRequest, match=field) as refused:
        Rig().req([1, 2, 3], **{field: bad})  # type: ignore[arg-type]
    assert refused.value.param == field


def test_the_whole_vocabulary_may_be_named() -> None:
    rig = Rig()
    req = rig.req([1, 2, 3], logit_bias={0: 1.0, VOCAB - 1: -1.0}, stop_token_ids=(0, VOCAB - 1))
    assert req.request.sampling.stop_token_ids == (0, VOCAB - 1)
    rig.close()


def asked(prompt: list[int], forced: tuple[int, ...] = ()) -> Req:
    """The request of a message, on a worker that holds contexts of 10 tokens."""
    request = GenerateRequest(
        request_id="r", sampling=SamplingParams(), room=1, epoch=0, prompt=pack_tokens(prompt), forced=forced
    )
    return Req.from_request(request, "m", RequestLimits(10, VOCAB, ()))


def test_a_context_leaves_room_for_a_token() -> None:
    assert asked([1] * 9).prompt_len == 9
    assert asked([1] * 5, (2,) * 4).input_len == 9
    for prompt, forced in (([1] * 10, ()), ([1] * 5, (2,) * 5)):
        with pytest.raises(ContextTooLong):
            asked(prompt, forced)


def test_forced_tokens_outside_the_vocabulary_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="forced"):
        asked([1], (VOCAB,))
