"""Operator: the machine from which `ray up` is run: a host's network, a checkout and a home of its own."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

from tests.cluster_hosts.host import make_key
from tests.cluster_hosts.readme import ROOT, replaced
from tests.hosts.network import Network

_CLUSTER = Path("deploy", "cluster.yaml")
_COPY = ("rsync", "-a", "--exclude=.venv", "--exclude=.git", "--exclude=__pycache__")
# ssh reads the home of /etc/passwd and not $HOME, so it must be told where its files are.
_SSH = """#!/bin/sh
exec /usr/bin/ssh -F {home}/.ssh/config "$@"
"""
_SSH_CONFIG = """
IdentityFile {home}/.ssh/id_ed25519
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""


class Operator:
    """Runs commands in its checkout's root, with this virtual environment, from a host of the network."""

    def __init__(self, net: Network, name: str, folder: Path) -> None:
        self.address = net.address(name)
        self.checkout = folder / "baton"
        self._net, self._name, self._folder = net, name, folder
        home, temporary, tools = folder / "home", folder / "tmp", folder / "bin"
        for path in (home / ".ssh", temporary, tools, self.checkout):
            path.mkdir(parents=True, exist_ok=True)
        self._key = home / ".ssh" / "id_ed25519"
        if not self._key.exists():
            make_key(self._key)
        (home / ".ssh" / "config").write_text(_SSH_CONFIG.format(home=home))
        (tools / "ssh").write_text(_SSH.format(home=home))
        (tools / "ssh").chmod(0o755)
        subprocess.run([*_COPY, f"{ROOT}/", self.checkout], check=True)
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "BATON_"))}
        self._environment = {
            **kept,
            "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(home),
            "TMPDIR": str(temporary),
            "RAY_TMPDIR": str(temporary),
            "RAY_USAGE_STATS_ENABLED": "0",
        }

    @property
    def public_key(self) -> str:
        """What hosts must accept."""
        return self._key.with_suffix(".pub").read_text()

    def edit_cluster_file(self, words: Mapping[str, str]) -> None:
        """The shipped file with other words, in place of what the checkout has."""
        (self.checkout / _CLUSTER).write_text(replaced((ROOT / _CLUSTER).read_text(), words))

    def put(self, text: str, path: str) -> None:
        """A file of the head's ~/baton, from one of the checkout."""
        (self.checkout / path).write_text(text)
        self.run(f"ray rsync-up {_CLUSTER} {path} {shlex.quote(f'~/baton/{path}')}", 60.0)

    def run(self, command: str, timeout_s: float) -> str:
        """A shell command. Returns its output; raises RuntimeError with the end of it when it fails or takes
        longer."""
        with self._net.on(self._name):
            child = subprocess.Popen(
                ["bash", "-c", command],
                cwd=self.checkout,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        try:
            output, _ = child.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(child.pid, signal.SIGKILL)
            output = f"{child.communicate()[0]}\n(ended after {timeout_s:.0f} s)"
        with (self._folder / "operator.log").open("a") as log:
            log.write(f"$ {command}\n{output}\n")
        if child.returncode:
            raise RuntimeError(f"{command}: exit {child.returncode}\n{output[-3000:]}")
        return output
