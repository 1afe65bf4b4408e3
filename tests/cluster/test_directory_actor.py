"""The directory's actor is asked again while it is between two owners."""

from __future__ import annotations

import pytest

from cluster.directory_actor import patiently
from common.errors import Unavailable


def test_a_question_is_asked_again_until_there_is_an_answer() -> None:
    answers = iter([Unavailable("its owner has ended"), Unavailable("nobody has told its plan"), "decode"])

    def ask() -> str:
        answer = next(answers)
        if isinstance(answer, Unavailable):
            raise answer
        return answer

    assert patiently(ask, 10.0) == "decode"


def test_the_last_reason_is_raised_in_time() -> None:
    def ask() -> str:
        raise Unavailable("its owner has ended")

    with pytest.raises(Unavailable, match="owner"):
        patiently(ask, 0.2)
