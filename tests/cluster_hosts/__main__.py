"""`ray up` of deploy/cluster.yaml on hosts made of namespaces, requests, and an end of it all.

python -m tests.cluster_hosts [--disks FOLDER]

The commands are those of README's cluster section; only addresses and users are replaced in them and in
deploy/cluster.yaml. Every answer must be what `transformers.generate` says. After `ray down` a host may have
no process, listener or file of shared memory left. The last line is
`cluster ok: hosts=... up=...s served=... lost=... left=...`. Needs root and the packages openssh-server,
rsync and redis-server; without root it is skipped, with the reason.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import tests.cluster_hosts.host as hosts
import tests.hosts.network as network
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
            return _play(here)
    finally:
        if options.disks is None:
            shutil.rmtree(folder)


def say(line: str) -> None:
    """At once: a run takes minutes."""
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _play(here: Scene) -> int:
    began = time.monotonic()
    here.up()
    up_s = time.monotonic() - began
    say(f"up after {up_s:.0f} s")
    served = here.serve_shipped()
    say(f"the shipped configuration: {served} answers, all right")
    for backend in ("tcp", "mooncake"):
        count = here.serve_apart(backend)
        served += count
        say(f"prefill and decode on two hosts, pages over {backend}: {count} answers, all right")
    left = here.down()
    for one in left:
        say(f"left: {one}")
    state = "failed" if left else "ok"
    say(f"cluster {state}: hosts=2 up={up_s:.0f}s served={served} lost=0 left={len(left)}")
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main())
