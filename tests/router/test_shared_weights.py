"""One truth for the weights of versions, whatever is started again. The network is a queue here."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping

import pytest

from common.errors import Unavailable
from router.directory.client import DirectoryClient
from router.directory.directory import Directory
from router.directory.server import DirectoryServer
from router.shared_weights import SharedWeights
from tests.router.directory.test_directory import record
from tests.router.placement.test_versions import decode, divided, models
from wire.mailbox import Mail
from wire.messages.any_message import AnyMessage
from wire.messages.directory import Announce, Announced, View
from wire.settings import NO_SETTINGS, ModelWeights

LEASE_S = 3.0
A, B = {"v1": 1.0}, {"v2": 1.0}
Weights = Mapping[str, float]


class OneRouter:
    """As much of a router as shares weights."""

    def __init__(self, network: Network, configured: Weights | None, given: Weights | None = None) -> None:
        """`given` are in its options; `configured` is told by Serve."""
        self.models = models(m=given or {})
        self.models.update([decode("d1", version="v1"), decode("d2", version="v2", fingerprint="2")], 0.0)
        self.weights = SharedWeights(self.models, {"m": given or {}})
        self.client = DirectoryClient(
            "directory", network.to_directory(self), "", lambda: self.weights.settings
        )
        if configured is not None:
            self.weights.configure({"m": configured})

    @property
    def in_force(self) -> Weights:
        """What divides its streams; {} if both versions get some."""
        return next(
            (only for only in (A, B) if divided(self.models.by_name["m"], 50).keys() == only.keys()), {}
        )


class Network:
    """A directory, its routers and a worker. `step` is a second of all."""

    def __init__(self) -> None:
        self.now = 0.0
        self.routers: list[OneRouter] = []
        self.worker = NO_SETTINGS  # what a worker keeps, as worker/heartbeat.py does
        self.worker_lives = True
        self.reachable = True
        self.start_directory(0.0)

    def start_directory(self, settles_s: float = LEASE_S) -> None:
        self.server = DirectoryServer(Directory(LEASE_S, self.now + settles_s), self._from_directory)

    def start_router(self, configured: Weights | None = None, given: Weights | None = None) -> OneRouter:
        self.routers.append(OneRouter(self, configured, given))
        return self.routers[-1]

    def to_directory(self, router: OneRouter) -> Callable[[str, AnyMessage], None]:
        def send(_: str, message: AnyMessage) -> None:
            if self.reachable:
                self.server.take(Mail(str(self.routers.index(router)), message), self.now)
                self.server.publish(self.now)

        return send

    def step(self, seconds: int = 1) -> None:
        for _ in range(seconds):
            self.now += 1.0
            for router in self.routers:
                router.client.tick(self.now)
            if self.worker_lives:
                announce = Announce(record("p0"), settings=self.worker)
                self.server.take(Mail("tcp://p0", announce), self.now)
                self.server.publish(self.now)
            self.server.tick(self.now)

    def all_have(self, weights: Weights) -> bool:
        return all(router.in_force == weights for router in self.routers)

    def _from_directory(self, to: str, message: AnyMessage) -> None:
        if isinstance(message, Announced):
            self.worker = self.worker.with_told(message.settings)
        elif isinstance(message, View):
            self.routers[int(to)].weights.take(message.settings)


def scene(play: Callable[[Network], Awaitable[None]]) -> None:
    asyncio.run(play(Network()))  # type: ignore[arg-type]


async def say(network: Network, router: OneRouter, weights: Weights) -> None:
    """An operator's word, and what then happens."""
    saying = asyncio.create_task(router.weights.say("m", weights, 5.0))
    await asyncio.sleep(0)
    network.step()
    await saying


def test_a_word_reaches_every_router_and_one_that_starts_later() -> None:
    async def play(network: Network) -> None:
        one, _ = network.start_router({}), network.start_router({})
        network.step()
        assert network.all_have({})
        await say(network, one, B)
        assert network.all_have(B)
        network.start_router({})
        network.step()
        assert network.all_have(B)
        assert {router.weights.current("m").revision for router in network.routers} == {1}

    scene(play)


@pytest.mark.parametrize("survivor", ["router", "worker"])
def test_an_operators_word_survives_the_directory_and_the_routers(survivor: str) -> None:
    async def play(network: Network) -> None:
        one = network.start_router(A)
        network.step()
        await say(network, one, B)
        network.worker_lives = survivor == "worker"
        if survivor == "worker":
            network.routers.clear()
        network.start_directory()
        network.start_router(A)
        network.step(int(LEASE_S) + 2)
        assert network.all_have(B)

    scene(play)


def test_workers_are_told_before_they_announce_themselves_again() -> None:
    async def play(network: Network) -> None:
        one = network.start_router(A)
        network.step()
        network.worker_lives = False
        await say(network, one, B)
        assert network.worker.weights["m"].weights == B

    scene(play)


def test_a_worker_that_joins_later_is_told() -> None:
    async def play(network: Network) -> None:
        network.worker_lives = False
        one = network.start_router(A)
        network.step()
        await say(network, one, B)
        assert network.worker == NO_SETTINGS
        network.worker_lives = True
        network.step()
        assert network.worker.weights["m"].weights == B

    scene(play)


def test_a_new_configuration_of_a_router_that_starts_replaces_an_operators_word() -> None:
    async def play(network: Network) -> None:
        one = network.start_router(A)
        network.step()
        await say(network, one, B)
        network.start_router({"v1": 5.0})
        network.step(2)
        assert network.all_have(A), "of versions, v1 alone"

    scene(play)


def test_another_configuration_is_a_new_word_and_the_same_is_none() -> None:
    async def play(network: Network) -> None:
        one, other = network.start_router(A), network.start_router(A)
        network.step()
        await say(network, other, {})
        one.weights.configure({"m": A})
        network.step()
        assert network.all_have({}), "deployed again, with other changes"
        for router in network.routers:
            router.weights.configure({"m": B})
            network.step()
        assert network.all_have(B)
        await say(network, one, A)
        other.weights.configure({"m": {}})
        network.step(2)
        assert network.all_have({})
        assert other.weights.current("m") == ModelWeights(5, {}, {})

    scene(play)


def test_a_router_that_was_told_late_of_a_configuration_does_not_take_an_operators_word_back() -> None:
    async def play(network: Network) -> None:
        one, other = network.start_router(A), network.start_router(A)
        network.step()
        one.weights.configure({"m": B})
        network.step()
        await say(network, one, {})
        other.weights.configure({"m": B})
        network.step(2)
        assert network.all_have({})

    scene(play)


def test_weights_in_a_routers_options_are_a_configuration_too() -> None:
    async def play(network: Network) -> None:
        network.start_router(given=A)
        network.start_router()
        network.step(2)
        assert network.all_have(A), "without any, a router says nothing"

    scene(play)


def test_until_the_directory_answers_a_router_has_its_configuration_and_takes_no_word() -> None:
    async def play(network: Network) -> None:
        network.reachable = False
        one = network.start_router(A)
        network.step()
        assert network.all_have(A)
        with pytest.raises(Unavailable, match="not heard of the directory"):
            await one.weights.say("m", B, 0.01)
        assert network.all_have(A)

    scene(play)


def test_a_word_that_the_directory_does_not_confirm_is_told_later() -> None:
    async def play(network: Network) -> None:
        one, _ = network.start_router(A), network.start_router(A)
        network.step()
        network.reachable = False
        with pytest.raises(Unavailable, match="the others are told when"):
            await one.weights.say("m", B, 0.01)
        network.step()
        assert [router.in_force for router in network.routers] == [B, A]
        network.reachable = True
        network.step(2)
        assert network.all_have(B)

    scene(play)


def test_two_words_at_once_end_with_one_at_all_routers() -> None:
    async def play(network: Network) -> None:
        one, other = network.start_router({}), network.start_router({})
        network.step()
        saying = [
            asyncio.create_task(router.weights.say("m", weights, 5.0))
            for router, weights in ((one, A), (other, B))
        ]
        await asyncio.sleep(0)
        network.step(2)
        await asyncio.gather(*saying)
        assert network.all_have(one.in_force)
        assert one.in_force in (A, B)

    scene(play)


def test_weights_said_again_free_a_version_that_was_held_back() -> None:
    async def play(network: Network) -> None:
        one, other = network.start_router(A), network.start_router(A)
        network.step()
        held = other.models.by_name["m"].all[0]
        held.held_back = True
        network.step(2)
        assert held.held_back, "a View alone changes nothing"
        await say(network, one, A)
        assert not held.held_back

    scene(play)
