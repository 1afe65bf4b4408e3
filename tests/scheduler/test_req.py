"""Requests that are refused when their message arrives."""

from __future__ import annotations

import pytest

from common.errors import InvalidRequest
from tests.scheduler.rig import VOCAB, Rig


@pytest.mark.parametrize("bad", [-1, VOCAB, 1 << 63])
@pytest.mark.parametrize("field", ["logit_bias", "stop_token_ids"])
def test_sampling_with_ids_outside_the_vocabulary_is_refused(field: str, bad: int) -> None:
    value = {3: 1.0, bad: 2.0} if field == "logit_bias" else (3, bad)
    with pytest.raises(InvalidRequest, match=field) as refused:
        Rig().req([1, 2, 3], **{field: value})
    assert refused.value.param == field


def test_the_whole_vocabulary_may_be_named() -> None:
    rig = Rig()
    req = rig.req([1, 2, 3], logit_bias={0: 1.0, VOCAB - 1: -1.0}, stop_token_ids=(0, VOCAB - 1))
    assert req.request.sampling.stop_token_ids == (0, VOCAB - 1)
    rig.close()
