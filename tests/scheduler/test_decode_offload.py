"""What is generated goes to the host while the answer goes on, and prompts that contain it find it there."""

from __future__ import annotations

import itertools

import pytest

from kvcache.radix_key import RadixKey
from kvcache.tiers.config import TierConfig
from scheduler.config import SchedulerConfig
from scheduler.req import Req, ReqState
from tests.kvcache.support import HandMover
from tests.scheduler.rig import GROUPS, Rig, StubReader

PAGE = 4
STRIDE = 16
PROMPT = range(100, 117)


def rig_of(groups: tuple[str, ...], depth: int, stride: int = STRIDE, policy: str = "write_through") -> Rig:
    """Checkpoints of states are 8 tokens apart, a window has 10."""
    tiers = TierConfig(ratio=4.0, decode_offload_tokens=stride, write_policy=policy)
    config = SchedulerConfig(model="m", max_running_requests=4, overlap_depth=depth, chunked_prefill_size=12)
    return Rig(
        PAGE, 512, 256, config=config, groups=groups, window=10, interval=8, tiers=tiers, mover=HandMover(),
        engine_overlap=depth > 0,
    )  # fmt: skip


def on_host(rig: Rig, req: Req) -> int:
    """Tokens of the request's context that the host has."""
    path, _ = rig.memory.cache.tree.walk(RadixKey(req.fill_ids, req.namespace, req.tenant))
    copied = itertools.takewhile(lambda node: node.host is not None and not node.host.is_empty, path)
    return sum(node.num_tokens for node in copied)


def step(rig: Rig) -> None:
    assert isinstance(rig.mover, HandMover)
    rig.step()
    rig.mover.do_all()


@pytest.mark.parametrize("depth", [0, 1])
@pytest.mark.parametrize("groups", GROUPS, ids="+".join)
def test_a_long_answer_goes_down_as_it_grows(groups: tuple[str, ...], depth: int) -> None:
    rig = rig_of(groups, depth)
    reqs = [rig.add(PROMPT, 100), rig.add(range(300, 330), 90), rig.add(PROMPT, 60)]
    lag = STRIDE + 2 * PAGE  # tokens whose KV is valid, and not yet on the host
    while not rig.scheduler.idle:
        step(rig)
        for req in reqs:
            assert req.state is not ReqState.RUNNING or on_host(rig, req) >= req.kv_committed_len - lag
    rig.assert_outputs()
    known = [*PROMPT, *rig.policy.outputs[1][:70]]
    rig.memory.cache.tree.evict("full", rig.memory.num_pages)
    rig.add(known, 5)
    computed = rig.scheduler.metrics.prefill_tokens
    while not rig.scheduler.idle:
        step(rig)
    assert rig.policy.outputs[4] == rig.policy.outputs[1][70:75]
    assert rig.scheduler.metrics.prefill_tokens - computed <= 8 + PAGE
    rig.assert_outputs()
    rig.close()


def test_uses_are_not_counted() -> None:
    """Nothing of the answer is used again because it goes on: write_through_selective keeps it here."""
    rig = rig_of((), 0, policy="write_through_selective")
    req = rig.add(PROMPT, 60)
    while len(req.output_ids) < 50:
        step(rig)
    assert on_host(rig, req) <= len(PROMPT)
    assert max(node.hit_count for node in rig.memory.cache.tree.nodes()) <= 1, "its last chunk uses the first"
    while not rig.scheduler.idle:
        step(rig)
    rig.close()


@pytest.mark.parametrize(("policy", "stride"), [("write_back", STRIDE), ("write_through", 0)])
def test_an_answer_may_go_down_at_its_end(policy: str, stride: int) -> None:
    rig = rig_of((), 0, stride, policy)
    req = rig.add(PROMPT, 60)
    while len(req.output_ids) < 50:
        step(rig)
    cached = sum(node.num_tokens for node in rig.memory.cache.tree.nodes())
    assert cached == len(PROMPT) // PAGE * PAGE, "the answer is in the tree"
    while not rig.scheduler.idle:
        step(rig)
    assert sum(node.num_tokens for node in rig.memory.cache.tree.nodes()) > cached
    rig.close()


@pytest.mark.parametrize("depth", [0, 1])
def test_what_is_sent_of_an_answer_is_kept_when_an_equal_one_goes_down_first(depth: int) -> None:
    rig = rig_of((), depth)
    first, second = rig.add(PROMPT, 60), rig.add(PROMPT, 60)
    while len(second.output_ids) < STRIDE:
        step(rig)
    slots = rig.scheduler._requests.pages.slots(second, second.kv_committed_len // PAGE * PAGE)
    second.reader = reader = StubReader(reads=(slots[::PAGE] // PAGE).tolist())
    while second.cache_protected_len < len(slots) + STRIDE:
        step(rig)
        assert not set(reader.reads) & set(rig.memory.allocator.free_pages)
    assert first.cache_protected_len >= len(slots)
    assert (slots[-PAGE:] // PAGE).tolist() != reader.reads[-1:] * PAGE, "it has the other's pages now"
    reader.idle = True
    step(rig)
    assert set(reader.reads) & set(rig.memory.allocator.free_pages)
    while not rig.scheduler.idle:
        step(rig)
    rig.assert_outputs()
    rig.close()
