from __future__ import annotations

import threading

import numpy as np
import pytest

from engine.batch import BatchResult
from engine.errors import EngineError
from engine.launch import LaunchQueue


def test_a_result_that_does_not_come_in_time_is_an_engine_error() -> None:
    may_end = threading.Event()

    def forward() -> BatchResult:
        assert may_end.wait(60)
        return BatchResult(np.array([7]), [None])

    queue = LaunchQueue(overlap=True)
    launched = queue.launch(forward)
    with pytest.raises(EngineError, match="no result"):
        launched.result(0.0)
    may_end.set()
    assert launched.result(60).tokens.tolist() == [7]
    queue.close()
