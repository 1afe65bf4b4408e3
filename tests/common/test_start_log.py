"""How much of some bytes is done, in few lines."""

from __future__ import annotations

import logging

import pytest

import common.start_log
from common.start_log import StartProgress, gigabytes


def test_progress_is_said_for_each_tenth_at_most_once_a_second(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = [0.0]
    monkeypatch.setattr(common.start_log.time, "monotonic", lambda: now[0])
    progress = StartProgress("weights read", 100_000_000)
    with caplog.at_level(logging.INFO, logger="baton.start"):
        for step in range(100):
            now[0] = step / 10
            progress.add(1_000_000)
    said = [record.getMessage() for record in caplog.records]
    assert said[0] == "weights read: 11% of 0.1 GB"
    assert said[-1] == "weights read: 93% of 0.1 GB"
    assert len(said) == 9


def test_a_second_is_not_filled_with_lines(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(common.start_log.time, "monotonic", lambda: 0.0)
    progress = StartProgress("weights read", 10)
    with caplog.at_level(logging.INFO, logger="baton.start"):
        for _ in range(10):
            progress.add(1)
    assert caplog.records == []


@pytest.mark.parametrize(("nbytes", "text"), [(1_190_000_000, "1.19 GB"), (33_600_000, "0.0336 GB")])
def test_bytes_are_told_in_gigabytes(nbytes: int, text: str) -> None:
    assert gigabytes(nbytes) == text
