"""UnderLoad: clients that stream without pause while hosts join and die and replicas come and go."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from tests.chaos_ray.streams import Question, Streams
from tests.cluster_hosts.asking import chat, prompts, reference
from tests.cluster_hosts.cluster import Cluster
from tests.cluster_hosts.host import Host
from tests.cluster_hosts.scene import Scene, configuration
from tests.cluster_hosts.seen import Seen

_CLIENTS = 6
# More than a worker has memory for: otherwise one decode worker remembers all prompts and gets all streams.
_PROMPTS, _PROMPT_TOKENS, _TOKENS, _MEMORY_TOKENS = 12, 100, 300, 4096
_GIVE_UP_S = 240.0  # a stream waits while a host's death is noticed and its replicas start elsewhere
_SOME = 2 * _CLIENTS  # streams that must end before the next thing happens
_WHOLE_S, _NODES_S, _DRAIN_S = 300.0, 600.0, 180.0
# A router on each host: Serve has an ingress where it has a replica, and clients come to every host.
SMALL = {"router": 3, "prefill": 1, "decode": 1}
LARGE = {"router": 3, "prefill": 3, "decode": 2}
TWO_HOSTS = {"router": 2, "prefill": 1, "decode": 1}


class UnderLoad:
    """What happens to the cluster of a scene; each method returns when clients have been served after it."""

    def __init__(self, scene: Scene, streams: Streams, seen: Seen) -> None:
        self.streams = streams
        self._scene, self._seen = scene, seen

    def scale(self, replicas: Mapping[str, int]) -> None:
        """A changed num_replicas of the configuration; no stream may break off."""
        self._scene.deploy(sized(replicas))
        self._whole(replicas)

    def host_dies(self, replicas: Mapping[str, int]) -> None:
        """A host that decodes and is not the head loses power, and comes back after clients were served."""
        victim = self._decoding_host()
        with self._routers_may_fail():
            victim.kill()
            self._cluster.wait_for_nodes(self._addresses() - {victim.address}, _NODES_S)
            self._serves()
            victim.start()
            self._cluster.wait_for_nodes(self._addresses(), _NODES_S)
            self._whole(replicas)

    def head_dies(self, replicas: Mapping[str, int]) -> None:
        """The head loses power. Clients are served while it is off; then `ray up` brings it back."""
        with self._routers_may_fail():
            self._cluster.head.kill()
            self._serves()
            self._cluster.head.start()
            self._scene.up_again()
            self._cluster.wait_for_nodes(self._addresses(), _NODES_S)
            self._whole(replicas)

    def host_is_drained(self) -> None:
        """A host that decodes and is not the head is drained and then switched off. No stream may break off:
        clients come to the other hosts from then on."""
        victim = self._decoding_host()
        self.streams.urls = [url for url in self.streams.urls if victim.address not in url]
        self._scene.drain(victim)
        self._cluster.wait_until_left(("decode",), victim.address, _DRAIN_S)
        self._seen.look()  # the host's router has not ended yet: it fits nowhere else
        self._cluster.wait_until_left(LARGE, victim.address, _DRAIN_S)
        self._serves()
        self._scene.switch_off(victim)
        self._cluster.wait_for_nodes(self._addresses(), _NODES_S)
        self._serves()

    @property
    def _cluster(self) -> Cluster:
        return self._scene.cluster

    def _addresses(self) -> set[str]:
        return {host.address for host in self._cluster.hosts}

    def _decoding_host(self) -> Host:
        decoding = set(self._cluster.addresses("decode"))
        return next(host for host in self._cluster.hosts[1:] if host.address in decoding)

    def _whole(self, replicas: Mapping[str, int]) -> None:
        self._cluster.wait_for_replicas(replicas, _WHOLE_S)
        self._cluster.wait_for_ingress(_WHOLE_S)
        self._serves()

    def _serves(self) -> None:
        """Until each client has ended some streams more."""
        self.streams.wait_for_more(_SOME, _GIVE_UP_S)

    @contextmanager
    def _routers_may_fail(self) -> Iterator[None]:
        """Streams of a dead router break off, and must then be resumed elsewhere: until all have ended."""
        self.streams.routers_fail = True
        yield
        self.streams.wait_for_more(_CLIENTS, _GIVE_UP_S)
        self.streams.routers_fail = False


def sized(replicas: Mapping[str, int]) -> dict[str, Any]:
    """The configuration with these replicas, no two of a kind on one host."""
    apart = {name: {"max_replicas_per_node": 1} for name in replicas}
    config = configuration("auto", **apart)
    (application,) = config["applications"]
    application["args"]["worker"]["max_total_tokens"] = _MEMORY_TOKENS
    application["deployments"] = [{"name": name, "num_replicas": count} for name, count in replicas.items()]
    return config


@contextmanager
def under_load(scene: Scene, seen: Seen, replicas: Mapping[str, int]) -> Iterator[UnderLoad]:
    """The application of that size on three hosts, and the clients. They end with the block."""
    questions = draw_questions()
    scene.deploy_anew(sized(replicas), replicas)
    scene.cluster.wait_for_ingress(_WHOLE_S)
    for host in scene.cluster.hosts:
        chat(host.address)

    def draw(rng: random.Random) -> Question:
        return rng.choice(questions)

    with Streams(scene.urls, _CLIENTS, draw, _GIVE_UP_S) as streams:
        streams.wait_for_more(_SOME, _GIVE_UP_S)
        yield UnderLoad(scene, streams, seen)


@functools.cache
def draw_questions() -> list[Question]:
    """What the clients ask. It takes a while: call it before it is needed."""
    drawn = prompts(2, _PROMPTS, _PROMPT_TOKENS, _TOKENS)
    return [Question(one, reference(tuple(one), _TOKENS)) for one in drawn]
