"""Kept responses: bounds of a store, and routers that share them."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import Unavailable
from router import kept_responses
from router.kept_responses import KeptResponses, ResponseKey, ResponseStore
from router.options import ResponseOptions
from wire.messages.any_message import AnyMessage
from wire.messages.rooms import Ack
from wire.messages.routers import DropResponse, FindResponse, FoundResponse, KeepResponse
from wire.sockets import Mail

GOLD, LEAD = ResponseKey("gold", "r1"), ResponseKey("lead", "r1")


def options(count: int = 100, size: int = 1000, age_s: float = 10.0) -> ResponseOptions:
    return ResponseOptions(kept_responses=count, kept_responses_bytes=size, kept_responses_s=age_s)


def test_a_tenant_finds_its_own_only() -> None:
    store = ResponseStore(options())
    assert store.keep(GOLD, b"a", 0.0)
    assert (store.find(GOLD, 1.0), store.find(LEAD, 1.0)) == (b"a", None)
    store.drop(LEAD)
    assert store.find(GOLD, 1.0) == b"a"
    store.drop(GOLD)
    assert (store.find(GOLD, 1.0), len(store), store.size) == (None, 0, 0)


def test_it_is_forgotten_with_its_age() -> None:
    store = ResponseStore(options(age_s=10.0))
    store.keep(GOLD, b"a", 0.0)
    assert store.find(GOLD, 9.9) == b"a"
    assert store.find(GOLD, 10.0) is None
    store.keep(LEAD, b"b", 10.0)
    assert (len(store), store.size) == (1, 1)


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(0, 60), st.floats(0, 8))),
    st.integers(0, 4),
    st.integers(0, 100),
)
def test_its_bounds_hold(steps: list[tuple[int, int, float]], count: int, size: int) -> None:
    store, now = ResponseStore(options(count, size)), 0.0
    last: dict[ResponseKey, tuple[bytes, float]] = {}
    for number, length, pause_s in steps:
        now += pause_s
        key, content = ResponseKey("", str(number)), bytes([number]) * length
        assert store.keep(key, content, now) == (length <= size and count > 0)
        last[key] = content, now
        assert len(store) <= count
        assert store.size <= size
        for known, (said, at) in last.items():
            assert store.find(known, now) in ((said, None) if now < at + 10.0 else (None,))


class Routers:
    """Routers by name, whose messages arrive at once. Messages to those that are `gone` are lost."""

    def __init__(self, *names: str) -> None:
        self.gone: set[str] = set()
        self.all = {name: KeptResponses(options(), self._sender(name), self._others(name)) for name in names}

    def _others(self, name: str):  # type: ignore[no-untyped-def]
        return lambda: {other for other in self.all if other != name}

    def _sender(self, name: str):  # type: ignore[no-untyped-def]
        def send(to: str, message: AnyMessage) -> None:
            if to not in self.gone:
                assert self.all[to].take(Mail(name, message))

        return send


def test_any_router_finds_it_and_one_may_go() -> None:
    asyncio.run(_finds_it())


async def _finds_it() -> None:
    routers = Routers("a", "b", "c", "d")
    assert routers.all["a"].keep(GOLD, b"said")
    for router in routers.all.values():
        assert await router.find(GOLD) == b"said"
        assert await router.find(LEAD) is None
    keepers = [name for name, one in routers.all.items() if one._store.find(GOLD, 0.0)]
    assert len(keepers) == 2
    for gone in keepers:
        left = next(name for name in routers.all if name not in keepers)
        routers.gone = {gone}
        assert await routers.all[left].find(GOLD) == b"said"
    routers.gone = set()
    routers.all["b"].drop(GOLD)
    assert [await router.find(GOLD) for router in routers.all.values()] == [None] * 4


def test_a_silent_router_may_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_responses, "_ANSWER_S", 0.01)
    routers = Routers("a", "b")
    routers.gone = {"b"}
    with pytest.raises(Unavailable, match="not every router"):
        asyncio.run(routers.all["a"].find(GOLD))


def test_nobody_else_is_told() -> None:
    told: list[AnyMessage] = []
    alone = KeptResponses(options(), lambda _, message: told.append(message), lambda: {"b"})
    alone.keep(GOLD, b"said")
    told.clear()
    for message in (FindResponse(*GOLD, 1), KeepResponse(*GOLD, b"other"), DropResponse(*GOLD)):
        assert alone.take(Mail("stranger", message))
    assert told == []
    assert alone.take(Mail("b", FindResponse(*GOLD, 2)))
    assert told == [FoundResponse(2, b"said")]
    assert not alone.take(Mail("b", Ack([])))
