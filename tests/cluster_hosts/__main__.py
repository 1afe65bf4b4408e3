"""`ray up` of deploy/cluster.yaml on hosts made of namespaces, requests, and an end of it all.

python -m tests.cluster_hosts [--disks FOLDER] [--only PART...]

The commands are those of README's cluster section and of docs/operations.md; only addresses and users are
replaced in them and in deploy/cluster.yaml. First the shipped configuration, then prefill and decode on two
hosts with pages over tcp and over Mooncake; a third host joins. Then clients stream without pause while
replicas come, a host and the head die and come back, the third host is drained and switched off, and replicas
go. On the two hosts that are left, workers of the fake engine change their roles, and objectives scale them.
Every answer must be what `transformers.generate` says (or the fake engine's oracle). A stream may break off
where its ingress or router died, and must then be resumed. After `ray down` no host may have a process, a
listener or a file of shared memory. The last line is
`cluster ok: hosts=2 up=...s served=... lost=0 moved=... roles=...`: right answers; others; rooms that decode
workers handed over with their KV when they left; changes of a worker's role.

It needs root and the packages openssh-server, rsync and redis-server. Without root it is skipped, with the
reason.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx

import tests.cluster_hosts.host as hosts
import tests.hosts.network as network
from tests.chaos_ray.streams import Streams
from tests.cluster_hosts.load import LARGE, SMALL, TWO_HOSTS, UnderLoad, draw_questions, under_load
from tests.cluster_hosts.objective import scale_by_objective
from tests.cluster_hosts.roles import change_roles
from tests.cluster_hosts.scene import HOSTS, OPERATOR, Scene, scene
from tests.cluster_hosts.seen import Seen
from tests.cluster_hosts.wheels import wheels

_LOAD: dict[str, tuple[str, Callable[[UnderLoad], None]]] = {
    "grow": ("prefill 1 to 3, decode 1 to 2", lambda load: load.scale(LARGE)),
    "host": ("a host died and came back", lambda load: load.host_dies(LARGE)),
    "head": ("the head died and came back", lambda load: load.head_dies(LARGE)),
    "drain": ("a host was drained and switched off", lambda load: load.host_is_drained()),
    "shrink": ("prefill 3 to 1, decode 2 to 1", lambda load: load.scale(TWO_HOSTS)),
}
_PARTS = ("serve", *_LOAD, "roles", "objective")
_CACHE = Path("/var/tmp/baton-cluster")  # not below /tmp or /root, which hosts have their own of


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 when everything was served and nothing is left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--disks", type=Path, help="keep the hosts' disks there; what setup installed is there the next time"
    )
    parser.add_argument("--only", choices=_PARTS, nargs="+", default=_PARTS, help="these parts only")
    options = parser.parse_args(argv)
    if os.geteuid() != 0:
        say("skipped: network namespaces need root")
        return 0
    why = hosts.missing() or network.missing()
    if why:
        say(f"failed: {why}")
        return 1
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the hosts are switched off then, too
    network.remove_stale()
    _CACHE.mkdir(exist_ok=True)
    packages = wheels(_CACHE)
    folder = options.disks or Path(tempfile.mkdtemp(prefix="run-", dir=_CACHE))
    try:
        with (
            network.Network((*HOSTS, OPERATOR)) as net,
            net.on(OPERATOR),
            scene(net, folder.resolve(), packages) as here,
        ):
            return _play(here, options.only)
    finally:
        if options.disks is None:
            shutil.rmtree(folder)


@dataclass
class Result:
    """Of a run, for its last line."""

    served: int = 0  # right answers
    lost: int = 0
    failed: bool = False  # something else did not come true
    resumed: int = 0
    clients: list[Streams] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def total(self) -> None:
        """Add what the clients have counted."""
        for streams in self.clients:
            self.served += streams.counts.streams - streams.counts.incomplete
            self.lost += streams.counts.incomplete
            self.resumed += streams.counts.resumed
            self.problems += streams.problems[:20]


def say(line: str) -> None:
    """At once: a run takes minutes."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


@contextmanager
def _timed(what: str, streams: Streams | None = None) -> Iterator[None]:
    """Say how long it took, and what the clients have counted by then."""
    began = time.monotonic()
    yield
    counts = f"; {streams.counts}" if streams else ""
    say(f"{what}: {time.monotonic() - began:.0f} s{counts}")


def _play(here: Scene, parts: Sequence[str]) -> int:
    """These parts, between `ray up` and `ray down`."""
    began = time.monotonic()
    with _timed("ray up"), ThreadPoolExecutor(1) as meanwhile:
        if _LOAD.keys() & set(parts):
            meanwhile.submit(draw_questions)
        here.up()
    up_s = time.monotonic() - began
    result, seen = Result(), Seen(here.cluster)
    try:
        _run_parts(here, parts, result, seen)
    except (AssertionError, RuntimeError, httpx.HTTPError) as error:  # everything is ended all the same
        result.problems.append(f"failed: {error!r}")
        result.failed = True
    result.total()
    with _timed("ray down"):
        left = here.down()
    for line in (*result.problems, *(f"left: {one}" for one in left)):
        say(line)
    is_good = not result.failed and not result.lost and not left
    say(f"in all: {time.monotonic() - began:.0f} s; resumed={result.resumed} left={len(left)}")
    say(
        f"cluster {'ok' if is_good else 'failed'}: hosts=2 up={up_s:.0f}s served={result.served} "
        f"lost={result.lost} moved={seen.moves} roles={seen.switches}"
    )
    return 0 if is_good else 1


def _run_parts(here: Scene, parts: Sequence[str], result: Result, seen: Seen) -> None:
    if "serve" in parts:
        with _timed("the shipped configuration answers"):
            result.served += here.serve_shipped()
    here.add()
    if "serve" in parts:
        for backend in ("tcp", "mooncake"):
            with _timed(f"prefill and decode on two hosts, pages over {backend}"):
                result.served += here.serve_apart(backend)
    with _timed("a third host has joined"):
        here.wait_for_join()
    if _LOAD.keys() & set(parts):
        _load(here, parts, result, seen)
        assert seen.moves or not {"drain", "shrink"} & set(parts), "no room moved with its KV"
    if "roles" in parts:
        with _timed("workers changed their roles"):
            result.clients.append(change_roles(here, seen))
        seen.look()
    if "objective" in parts:
        _scale(here, result, seen)


def _load(here: Scene, parts: Sequence[str], result: Result, seen: Seen) -> None:
    began = time.monotonic()
    with under_load(here, seen, SMALL if "grow" in parts else LARGE) as load:
        result.clients.append(load.streams)
        say(f"clients stream: {time.monotonic() - began:.0f} s")
        for part, (what, step) in _LOAD.items():
            if part in parts:
                seen.look()
                moves = seen.moves
                with _timed(what, load.streams):
                    step(load)
                seen.look()
                say(f"  rooms that moved with their KV: {seen.moves - moves}")


def _scale(here: Scene, result: Result, seen: Seen) -> None:
    with _timed("objectives scaled prefill and decode"):
        grown_s, shrunk_s, streams = scale_by_objective(here)
    result.clients += streams
    seen.look()
    say(f"  to 3 and 2 in {grown_s:.0f} s, and back to 1 and 1 in {shrunk_s:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
