"""Freed pages wait for the results of the forwards that may touch them, and no longer."""

from __future__ import annotations

from unittest.mock import Mock, call

import numpy as np

from kvcache.memory import Memory
from kvcache.request import GroupPages
from scheduler.deferred import DeferredFrees


def pages(*ids: int) -> GroupPages:
    return {"full": np.asarray(ids, dtype=np.int32)}


def test_pages_are_free_with_the_result_of_the_last_forward_that_may_touch_them() -> None:
    memory = Mock(spec=Memory)
    deferred = DeferredFrees(memory)
    first, second, third = pages(1, 2), pages(3), pages(4)
    for held, launch in ((first, 3), (second, 3), (pages(), 4), (third, 5)):
        deferred.hold(held, launch)
    deferred.landed(2)
    assert not memory.free.called
    deferred.landed(3)
    assert memory.free.call_args_list == [call(first), call(second)]
    assert deferred.pages() == [third]
    deferred.landed(6)
    assert memory.free.call_args_list[2:] == [call(third)]
    assert deferred.pages() == []
