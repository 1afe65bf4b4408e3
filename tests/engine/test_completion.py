"""Completions of a CUDA device, over stand-ins for torch's events."""

from __future__ import annotations

import pytest
import torch

from engine.completion import CudaCompletions


class Event:
    """An event of a stream that is done when it has been asked for the third time."""

    def __init__(self) -> None:
        self.stream: object = None
        self.asked = 0

    def record(self, stream: object) -> None:
        self.stream = stream

    def query(self) -> bool:
        assert self.stream == ("stream of", torch.device("cuda:1"))
        self.asked += 1
        return self.asked >= 3


class LostEvent(Event):
    def query(self) -> bool:
        raise RuntimeError("an illegal memory access was encountered")


class EndlessEvent(Event):
    def query(self) -> bool:
        return False


def completions(monkeypatch: pytest.MonkeyPatch, event: type[Event]) -> CudaCompletions:
    monkeypatch.setattr(torch.cuda, "Event", event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: ("stream of", device))
    return CudaCompletions(torch.device("cuda:1"))


def test_it_is_reached_when_the_event_is(monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[Event] = []

    class Kept(Event):
        def __init__(self) -> None:
            super().__init__()
            events.append(self)

    completions(monkeypatch, Kept).record().wait(60.0)
    assert [event.asked for event in events] == [3]


def test_the_wait_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TimeoutError):
        completions(monkeypatch, EndlessEvent).record().wait(0.001)


def test_a_device_that_failed_raises_what_it_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        completions(monkeypatch, LostEvent).record().wait(60.0)
