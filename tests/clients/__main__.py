"""Clients that nobody here wrote, from the registries, against the demo model and a random one.

python -m tests.clients [--only NAME] [--folder FOLDER]

Each client has an environment of its own in FOLDER and a script in tests/clients/scripts, which asserts what
it is answered. A client that cannot be installed has failed. The last line is "clients ok: N of N".
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.clients.catalogue import CLIENTS, Client
from tests.clients.environments import ROOT, NotInstalled, command, environment
from tests.clients.servers import Server, servers

_SHOWN = 3000  # characters of what a script that failed has said


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="clients with this in their names")
    parser.add_argument("--folder", type=Path, default=ROOT / ".clients", help="of the environments")
    options = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the servers are ended then, too
    chosen = [client for client in CLIENTS if options.only in client.name]
    places = {client.name: _installed(client, options.folder) for client in chosen}
    good = 0
    with tempfile.TemporaryDirectory(prefix="baton-clients-") as folder, servers(Path(folder)) as running:
        for client in chosen:
            place = places[client.name]
            worked = [place is not None and _works(client, place, server) for server in running]
            good += all(worked)
    failed = len(chosen) - good
    _say(f"clients failed: {failed}" if failed or not chosen else f"clients ok: {good} of {len(chosen)}")
    return 1 if failed or not chosen else 0


def _installed(client: Client, folder: Path) -> Path | None:
    began = time.monotonic()
    try:
        place = environment(client, folder.resolve())
    except NotInstalled as error:
        _say(f"{client.name}: not installed: {error}")
        return None
    if time.monotonic() - began > 1.0:
        _say(f"{client.name}: installed in {time.monotonic() - began:.0f} s")
    return place


def _works(client: Client, place: Path, server: Server) -> bool:
    began = time.monotonic()
    try:
        done = subprocess.run(
            command(client, place),
            env={**_environment(), **server.variables()},
            capture_output=True,
            text=True,
            timeout=client.seconds,
        )
        code, said = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired:
        code, said = 1, f"it has not ended within {client.seconds:.0f} s"
    outcome = "ok" if code == 0 else f"failed:\n{said[-_SHOWN:]}"
    _say(f"{client.name}, {server.name} model, {time.monotonic() - began:.0f} s: {outcome}")
    return code == 0


def _environment() -> dict[str, str]:
    """Ours without what would change a client: keys, proxies, telemetry."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.endswith(("_API_KEY", "_proxy", "_PROXY")) and name != "PYTHONPATH"
    }
    return {
        **kept,
        "HF_HUB_OFFLINE": "1",
        "OPENAI_API_KEY": "none",
        "DO_NOT_TRACK": "1",
        "LITELLM_LOCAL_MODEL_COST_MAP": "1",
    }


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
