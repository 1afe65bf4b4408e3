"""Freed pages wait for the results of the forwards that may touch them, and until they have been sent, and no
longer."""

from __future__ import annotations

from unittest.mock import Mock, call

import numpy as np

from kvcache.memory import Memory
from kvcache.radix_key import RadixKey
from kvcache.request import STATE_PAIR, GroupPages
from scheduler.config import SchedulerConfig
from scheduler.deferred import DeferredFrees
from scheduler.node_policy import AfterPrefill
from tests.scheduler.rig import Rig, StubReader


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


def test_pages_that_are_sent_are_free_when_they_have_been_read() -> None:
    memory, reader = Mock(spec=Memory), StubReader()
    deferred = DeferredFrees(memory)
    sent, later, other = pages(1), pages(2), pages(3)
    deferred.hold(sent, 0, reader)
    deferred.hold(later, 4, reader)
    deferred.hold(other, 4, StubReader(idle=True))
    deferred.landed(4)
    assert memory.free.call_args_list == [call(other)], "no later page waits for the reader"
    reader.idle = True
    deferred.hold(pages(4), 5, reader)
    deferred.free_unused()
    assert memory.free.call_args_list[1:] == [call(sent), call(later)]
    assert deferred.pages() == [pages(4)]


def test_a_chunk_that_was_sent_before_it_was_cached_is_kept_until_it_is_read() -> None:
    """There was no state slot to cache it with; meanwhile the tree gets equal pages from another worker."""
    config = SchedulerConfig(model="m", max_running_requests=2, chunked_prefill_size=12)
    rig = Rig(4, 256, config=config, after=AfterPrefill.HAND_OFF, groups=("state",), state_slots=16)
    req, states = rig.add(range(100, 140)), rig.memory.states
    assert states is not None
    taken = states.alloc(states.available_pages() - STATE_PAIR)
    rig.scheduler.step()
    assert (req.kv_committed_len, req.cache_protected_len) == (12, 0), "its chunk is not in the tree"
    sent = rig.scheduler._requests.pages.slots(req, 12)[::4] // 4
    req.reader = reader = StubReader(reads=sent.tolist())
    assert taken is not None
    states.free(taken[1:])
    copies = rig.memory.primary.alloc(3)
    assert copies is not None
    wanted = RadixKey(req.fill_ids[:12], req.namespace)
    rig.memory.cache.insert_copy(wanted, copies, 0, {"state": taken[:1]}, None)
    rig.step()
    assert req.cache_protected_len == 24
    row = rig.scheduler._requests.pages.slots(req, 24)
    assert not set(reader.reads) & set(row // 4), "they are duplicates"
    while req not in rig.policy.prefilled:
        rig.step()
        assert not set(reader.reads) & set(rig.memory.allocator.free_pages)
    reader.idle = True
    rig.step()
    assert set(reader.reads) <= set(rig.memory.allocator.free_pages)
    rig.scheduler.hand_off.release(req)
    rig.close()
