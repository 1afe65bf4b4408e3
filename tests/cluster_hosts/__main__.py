"""`ray up` of deploy/cluster.yaml on hosts made of namespaces, requests, and an end of it all.

python -m tests.cluster_hosts [--disks FOLDER] [--only serve|load|objective]

The commands are those of README's cluster section; only addresses and users are replaced in them and in
deploy/cluster.yaml. First the shipped configuration, then prefill and decode on two hosts with pages over tcp
and over Mooncake, then clients that stream without pause on three hosts while replicas come, a host and the
head die and come back, and replicas go; then objectives scale the fake engine. Every answer must be what
`transformers.generate` says (or the fake engine's oracle). A stream may break off where its ingress or router
died, and must then be resumed. After `ray down` no host may have a process, a listener or a file of shared
memory. The last line is
`cluster ok: hosts=2 up=...s served=... lost=0 moved=... resumed=... left=0 roles=...`.

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
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import httpx

import tests.cluster_hosts.host as hosts
import tests.hosts.network as network
from tests.chaos_ray.streams import Streams
from tests.cluster_hosts.load import LARGE, SMALL, under_load
from tests.cluster_hosts.objective import scale_by_objective
from tests.cluster_hosts.scene import HOSTS, OPERATOR, Scene, scene
from tests.cluster_hosts.wheels import wheels

_CACHE = Path("/var/tmp/baton-cluster")  # not below /tmp or /root, which hosts have their own of


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code: 0 when everything was served and nothing is left."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--disks", type=Path, help="keep the hosts' disks there; what setup installed is there the next time"
    )
    parser.add_argument("--only", choices=("serve", "load", "objective"), default="", help="one part only")
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
    moved: int = 0  # rooms handed to another decode worker with their KV
    resumed: int = 0
    clients: list[Streams] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    roles: str = ""  # replicas: before, at most, after

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


def _play(here: Scene, only: str) -> int:
    """All of it, or one part between `ray up` and `ray down`."""
    began = time.monotonic()
    here.up()
    up_s = time.monotonic() - began
    say(f"up after {up_s:.0f} s")
    result = Result()
    try:
        _parts(here, only, result)
    except (AssertionError, RuntimeError, httpx.HTTPError) as error:  # everything is ended all the same
        result.problems.append(f"failed: {error!r}")
        result.failed = True
    result.total()
    left = here.down()
    for line in (*result.problems, *(f"left: {one}" for one in left)):
        say(line)
    is_good = not result.failed and not result.lost and not left
    say(
        f"cluster {'ok' if is_good else 'failed'}: hosts=2 up={up_s:.0f}s served={result.served} "
        f"lost={result.lost} moved={result.moved} resumed={result.resumed} left={len(left)} "
        f"roles={result.roles}"
    )
    return 0 if is_good else 1


def _parts(here: Scene, only: str, result: Result) -> None:
    if only in ("", "serve"):
        _serve(here, result)
    here.join()
    say("a third host has joined")
    if only in ("", "load"):
        _load(here, result)
    if only in ("", "objective"):
        _scale(here, result)


def _serve(here: Scene, result: Result) -> None:
    count = here.serve_shipped()
    say(f"the shipped configuration: {count} answers, all right")
    for backend in ("tcp", "mooncake"):
        answers = here.serve_apart(backend)
        count += answers
        say(f"prefill and decode on two hosts, pages over {backend}: {answers} answers, all right")
    result.served += count


def _load(here: Scene, result: Result) -> None:
    with under_load(here) as load:
        result.clients.append(load.streams)
        steps: dict[str, Callable[[], None]] = {
            "prefill 1 to 3, decode 1 to 2": lambda: load.scale(LARGE),
            "a host died and came back": lambda: load.host_dies(LARGE),
            "the head died and came back": lambda: load.head_dies(LARGE),
            "prefill 3 to 1, decode 2 to 1": lambda: load.scale(SMALL),
        }
        for name, step in steps.items():
            began = time.monotonic()
            step()
            say(f"{name}: {time.monotonic() - began:.0f} s; {load.streams.counts}")
        result.moved = here.cluster.moved()
    sizes = (f"{role}:{SMALL[role]}-{LARGE[role]}-{SMALL[role]}" for role in ("prefill", "decode"))
    result.roles = ",".join(sizes)


def _scale(here: Scene, result: Result) -> None:
    grown_s, shrunk_s, streams = scale_by_objective(here)
    result.clients.append(streams)
    say(f"by objectives to 3 and 2 in {grown_s:.0f} s, and back in {shrunk_s:.0f} s; {streams.counts}")


if __name__ == "__main__":
    sys.exit(main())
