"""Calls that never return are given up, and what they use is given back when they end."""

from __future__ import annotations

import threading

import pytest

from kvcache.storage.bounded_calls import BoundedCalls


def test_answers_and_failures_come_back() -> None:
    calls = BoundedCalls(10, 2)
    assert calls.run(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        calls.run(lambda: 1 // 0)
    given_back: list[int] = []
    assert calls.run(lambda: 4, lambda: given_back.append(1)) == 4
    assert given_back == []


def test_a_stuck_call_is_left_behind_until_it_ends() -> None:
    calls = BoundedCalls(0.05, 1)
    end, returned, refused = threading.Event(), threading.Event(), threading.Event()
    with pytest.raises(TimeoutError, match="a call is stuck"):
        calls.run(end.wait, returned.set)
    assert calls.left_behind == 1
    assert not returned.is_set()
    with pytest.raises(TimeoutError, match="too many"):
        calls.run(lambda: 3, refused.set)
    assert refused.is_set()
    end.set()
    assert returned.wait(10)
    assert calls.left_behind == 0
    assert calls.run(lambda: 3) == 3


def test_a_thread_that_cannot_be_started_leaves_room_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    calls = BoundedCalls(0.05, 1)
    with monkeypatch.context() as full:
        full.setattr(threading.Thread, "start", start)
        with pytest.raises(RuntimeError, match="new thread"):
            calls.run(lambda: 3)
    assert calls.run(lambda: 3) == 3
