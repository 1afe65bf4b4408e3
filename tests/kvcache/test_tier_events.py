"""What events and snapshots say of each tier, step by step: all pages that are there, and nothing when a
window or a state is given up alone.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvcache.memory import Memory
from kvcache.tiers.config import TierConfig
from kvcache.tiers.tiers import Tiers
from tests.kvcache.driver import Driver
from tests.kvcache.support import NAMESPACE, HandMover, Index, groups, memory, reference_hashes
from tests.kvcache.test_tiers import STORAGE
from wire.events import AnyEvent
from wire.page_hash import event_hashes

FIRST = list(range(32))  # eight pages
SECOND = [*range(16), *range(100, 116)]  # the first half is the same
MEDIA = ("GPU", "CPU", "STORAGE")
KINDS = pytest.mark.parametrize("kinds", [(), ("window",), ("state",), ("window", "state")], ids="+".join)


class Scene:
    """A worker's memory with all tiers, whose moves are done by hand, and a consumer of its events."""

    def __init__(self, built: Memory, mover: HandMover) -> None:
        self.built = built
        self.mover = mover
        self.driver = Driver(built)
        self.indexes = {medium: Index(medium) for medium in MEDIA}

    @property
    def tiers(self) -> Tiers:
        assert self.built.tiers is not None
        return self.built.tiers

    def do(self, *lanes: str) -> None:
        """All work of these lanes, or of all."""
        while chosen := [lane for lane, *_ in self.mover.waiting if not lanes or lane in lanes]:
            self.mover.do(chosen[0])
            self.tiers.poll()

    def read(self) -> list[AnyEvent]:
        events, private = self.built.take_events()
        assert private == []
        for index in self.indexes.values():
            index.read(events)
        return events

    def told(self) -> dict[str, set[int]]:
        """The pages in each tier: what all events have said, which is what a snapshot says now."""
        self.read()
        snapshot = list(self.built.snapshot().public.batches(at_most=2))
        for medium, index in self.indexes.items():
            late = Index(medium)
            for events in snapshot:
                late.read(events)
            assert late.blocks == index.blocks
        return {medium: set(index.blocks) for medium, index in self.indexes.items()}

    def resident(self) -> set[int]:
        """The pages of the nodes that are on the device."""
        nodes = [node for node in self.built.cache.tree.nodes() if node.is_resident]
        return {name for node in nodes for name in event_hashes(node.page_digests(self.built.page_size))}

    def take_host(self, group: str) -> None:
        """Other copies need all host pages of a group."""
        arena = self.tiers.host.pool.arenas[group]
        taken = self.tiers.host.alloc({group: arena.num_pages})
        assert taken is not None
        self.tiers.host.pool.free(taken)


@pytest.fixture
def scene(request: pytest.FixtureRequest) -> Iterator[Scene]:
    mover = HandMover()
    tiers = TierConfig(
        ratio=2.0, load_back_threshold=1, storage=STORAGE, model_digest=bytes(32), prefetch_threshold=1
    )
    kinds: tuple[str, ...] = request.node.callspec.params["kinds"]
    with memory(4, 32, specs=groups(*kinds), mover=mover, tiers=tiers, max_context_len=64) as built:
        scene = Scene(built, mover)
        yield scene
        scene.do()
        built.check_memory()


def names(*prompts: list[int]) -> set[int]:
    return {name for prompt in prompts for name in reference_hashes(NAMESPACE, prompt, 4)}


@KINDS
def test_each_move_is_told_when_it_has_ended(scene: Scene, kinds: tuple[str, ...]) -> None:
    scene.driver.run(FIRST)
    assert scene.told() == {"GPU": names(FIRST), "CPU": set(), "STORAGE": set()}
    scene.do("backups")
    assert scene.told() == {"GPU": names(FIRST), "CPU": names(FIRST), "STORAGE": set()}
    scene.do("writes")
    assert scene.told() == dict.fromkeys(MEDIA, names(FIRST))
    scene.driver.run(SECOND)  # which divides what is on all tiers
    both = names(FIRST, SECOND)
    assert scene.told() == {"GPU": both, "CPU": names(FIRST), "STORAGE": names(FIRST)}
    scene.do()
    assert scene.told() == dict.fromkeys(MEDIA, both)
    scene.built.cache.tree.evict("full", 32)
    assert scene.told() == {"GPU": set(), "CPU": both, "STORAGE": both}
    scene.take_host("full")
    assert not any(scene.told().values())


@KINDS
def test_windows_and_states_are_given_up_in_silence(scene: Scene, kinds: tuple[str, ...]) -> None:
    for prompt in (FIRST, SECOND):
        scene.driver.run(prompt)
        scene.do()
    before = scene.told()
    assert before == dict.fromkeys(MEDIA, names(FIRST, SECOND))
    for kind in kinds:
        scene.take_host(kind)
        assert scene.read() == [], "the pages of the primary group are there"
        scene.built.cache.tree.evict(kind, 32)  # leaves go with what they lose, and stay on the host
        assert scene.told() == {**before, "GPU": scene.resident()}
    scene.driver.run(FIRST)  # what it computes again goes down again: nothing is told twice
    scene.do()
    assert scene.told() == {**before, "GPU": scene.resident()}


@KINDS
def test_a_cleared_storage_is_told_and_filled_again_by_what_is_new(
    scene: Scene, kinds: tuple[str, ...]
) -> None:
    scene.driver.run(FIRST)
    scene.do()
    assert scene.tiers.storage is not None
    scene.tiers.storage.clear(lambda held: None)
    scene.do()
    assert scene.told() == {"GPU": names(FIRST), "CPU": names(FIRST), "STORAGE": set()}
    scene.driver.run(SECOND)
    scene.do()
    told = scene.told()["STORAGE"]  # with what a new state has come to, that is written as a whole
    assert told == names(SECOND) - (names() if "state" in kinds else names(FIRST))
