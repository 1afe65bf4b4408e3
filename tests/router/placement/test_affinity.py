"""Policy prefix-affinity: an approximate tree from its own choices, followed until its worker is too busy."""

from __future__ import annotations

import random
from collections import OrderedDict

import hypothesis.strategies as st
from hypothesis import given
from msgspec.structs import replace

from router.index.global_index import as_hashes
from router.placement.affinity_policy import PrefixTrees
from router.placement.placement import Placement
from router.placement.placer import Placer
from router.placement.policy import PlacementRequest
from tests.router.placement.test_policy import PAGE, decode, names, placer, prefill
from wire.records import WorkerRecord


def prompt(*pages: int, tail: int = 0) -> PlacementRequest:
    """A prompt of these pages; their numbers stand for chained hashes."""
    return PlacementRequest(len(pages) * PAGE + tail, as_hashes(pages), 16)


def place(made: Placer, ask: PlacementRequest, now: float = 0.0) -> Placement:
    choice = made.choose(ask, now)
    assert choice is not None
    return made.place(choice, now)


def affine(*workers: str, **more: int) -> Placer:
    records = [prefill(name) if name < "d" else decode(name) for name in workers]
    return placer("prefix-affinity", records, **more)


def test_a_match_above_half_is_followed_without_any_event() -> None:
    made = affine("a", "b", "c", "d", "e", "f")
    first = place(made, prompt(*range(10)))
    for tail in range(20):
        again = place(made, prompt(*range(10), *range(100 + 9 * tail, 109 + 9 * tail)))
        assert names(again) == names(first)


def test_a_match_of_half_or_less_is_not() -> None:
    made = affine("a", "b", "d", "e")
    first = place(made, prompt(*range(10)))
    other = place(made, prompt(*range(10), *range(100, 110)))  # exactly half
    assert names(first)[0] != other.prefill
    assert names(first)[1] != other.decode


def test_a_queue_beyond_the_objective_is_left() -> None:
    made = affine("a", "b", "d")
    first = place(made, prompt(*range(100)))
    busy, idle = (names(first)[0] or ""), ({"a", "b"} - {names(first)[0]}).pop()
    made.close(first, 0.0)
    objective = int(made.policy.weights.queue_objective)
    made.update([prefill(busy, queued=objective), prefill(idle), decode("d")], 1.0)
    assert names(place(made, prompt(*range(100)), 1.0))[0] == busy
    made.update([prefill(busy, queued=objective + 1), prefill(idle), decode("d")], 2.0)
    assert names(place(made, prompt(*range(100)), 2.0))[0] == idle


def test_of_two_holders_the_less_loaded_takes_it() -> None:
    made = affine("a", "b", "d")
    first = place(made, prompt(*range(100)))
    made.update([prefill(names(first)[0] or "", queued=1 << 20), *made_others(first), decode("d")], 1.0)
    second = place(made, prompt(*range(100)), 1.0)
    assert names(second)[0] != names(first)[0]
    made.close(first, 1.0)
    made.close(second, 1.0)
    made.update([prefill("a"), prefill("b", queued=100), decode("d")], 2.0)
    assert names(place(made, prompt(*range(100)), 2.0))[0] == "a"


def made_others(placement: Placement) -> list[WorkerRecord]:
    return [prefill(({"a", "b"} - {names(placement)[0]}).pop())]


def test_decode_is_left_by_requests() -> None:
    made = affine("a", "d", "e")
    first = place(made, prompt(*range(100)))
    others = {"d", "e"} - {names(first)[1]}
    made.close(first, 0.0)
    busy = [decode(names(first)[1], requests=32), decode(others.copy().pop()), prefill("a")]
    made.update(busy, 1.0)
    followed = place(made, prompt(*range(100)), 1.0)
    assert names(followed)[1] == names(first)[1]
    made.update([decode(names(first)[1], requests=33), *busy[1:]], 2.0)
    assert names(place(made, prompt(*range(100)), 2.0))[1] in others


def test_decode_goes_alone_by_its_own_tree() -> None:
    made = affine("a", "d", alone_tokens=16)
    assert names(place(made, prompt(*range(10))))[0] == "a"
    assert names(place(made, prompt(*range(10), tail=16)))[0] is None
    assert names(place(made, prompt(*range(10), tail=17)))[0] == "a"


def test_a_worker_that_left_or_restarted_holds_nothing() -> None:
    made = affine("a", "b", "d")
    first = place(made, prompt(*range(100)))
    restarted = replace(prefill(names(first)[0] or ""), incarnation=99)
    made.update([restarted, *made_others(first), decode("d")], 1.0)
    seen = set()
    for _ in range(20):
        placement = place(made, prompt(*range(100)), 1.0)
        seen.add(names(placement)[0])
        made.close(placement, 1.0)
        made.policy.forget(names(placement)[0] or "")
    assert seen == {"a", "b"}


_PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=6)


@given(st.lists(st.tuples(st.sampled_from("xyz"), _PATHS, st.booleans()), max_size=40), st.integers(1, 8))
def test_trees_are_bounded_and_closed_under_prefixes(
    steps: list[tuple[str, list[int], bool]], capacity: int
) -> None:
    """Against a model: for each worker the paths it was given last."""
    trees = PrefixTrees()
    model: dict[str, OrderedDict[int, None]] = {}
    names: dict[tuple[int, ...], int] = {}
    rng = random.Random(3)
    for worker, path, stays in steps:
        hashes = [names.setdefault(tuple(path[: n + 1]), rng.getrandbits(62)) for n in range(len(path))]
        if stays:
            trees.add(worker, hashes, capacity)
            pages = model.setdefault(worker, OrderedDict())
            for page in reversed(hashes):
                pages.pop(page, None)
                pages[page] = None
            while len(pages) > capacity:
                pages.popitem(last=False)
        else:
            trees.forget(worker)
            model.pop(worker, None)
        held = {
            name: next((n for n, page in enumerate(hashes) if page not in pages), len(hashes))
            for name, pages in model.items()
        }
        longest, mask = trees.longest(hashes)
        assert longest == max(held.values(), default=0)
        assert {name: trees.held(name, hashes) for name in model} == held
        if longest:
            assert {name for name in "xyz" if trees.holds(name, mask)} == {
                name for name, count in held.items() if count == longest
            }
        assert len(trees) == len(set().union(*model.values())) if model else len(trees) == 0
