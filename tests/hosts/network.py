"""Network: namespaces as hosts, joined by veth pairs and a switch whose iptables rules are the faults.

Each host has an address of its own; the switch, one more namespace, forwards between them. So a fault between
two hosts is one rule on the switch, and no process notices how it is made. The kernel here has no netem: a
relay on the switch delays what passes (relay.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

_CLONE_NEWNET = 0x40000000
_PREFIX = "baton-hosts-"  # and the pid of whoever made the namespace
_RELAY_PORT = 9
_libc = ctypes.CDLL(None, use_errno=True)
_numbers = itertools.count()


def missing() -> str:
    """What this machine lacks for such a network; "" when nothing."""
    for tool in ("ip", "iptables"):
        if subprocess.run(["sh", "-c", f"command -v {tool}"], capture_output=True, check=False).returncode:
            return f"there is no {tool} (Debian: iproute2, iptables)"
    try:
        with Network(("probe",)):
            return ""
    except RuntimeError as error:
        return f"a network of namespaces cannot be made: {error}"


def remove_stale() -> None:
    """Remove the namespaces, and end the processes in them, of runs that were killed."""
    for line in _ip("netns", "list").splitlines():
        name = line.split()[0]
        if name.startswith(_PREFIX) and not Path("/proc", name[len(_PREFIX) :].split("-")[0]).exists():
            for pid in _ip("netns", "pids", name).split():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            _ip("netns", "del", name)


class Network:
    """Hosts by name. Close it, or use it as a context manager; end the processes on them first."""

    def __init__(self, hosts: Sequence[str]) -> None:
        stem = f"{_PREFIX}{os.getpid()}-{next(_numbers)}-"
        self._switch = f"{stem}switch"
        self._namespaces = {name: f"{stem}{name}" for name in hosts}
        self._subnets = {name: f"10.77.{number}" for number, name in enumerate(hosts, start=1)}
        self._relay: subprocess.Popen[bytes] | None = None
        try:
            _ip("netns", "add", self._switch)
            for name in hosts:
                self._join(name)
            self._on_switch("sysctl", "-qw", "net.ipv4.ip_forward=1")
            self._on_switch("ip", "link", "set", "lo", "up")
        except BaseException:
            self.close()
            raise

    def address(self, host: str) -> str:
        """The address that a host's sockets bind to and others reach."""
        return f"{self._subnets[host]}.2"

    @contextmanager
    def on(self, host: str) -> Iterator[None]:
        """This thread is on that host, and so are the threads and processes that it starts meanwhile."""
        with _entered(self._namespaces[host]):
            yield

    # -- faults ------------------------------------------------------------------------------------

    def part(self, one: str, other: str) -> None:
        """Nothing passes between two hosts any more."""
        for source, target in ((one, other), (other, one)):
            self._filter("-s", self.address(source), "-d", self.address(target), "-j", "DROP")

    def lose(self, share: float) -> None:
        """This share of all packets between any two hosts is lost."""
        self._filter("-m", "statistic", "--mode", "random", "--probability", str(share), "-j", "DROP")

    def delay(self, seconds: float) -> None:
        """Connections that begin from now on go through a relay, which hands bytes on after that time."""
        with _entered(self._switch):
            command = [sys.executable, "-m", "tests.hosts.relay", str(_RELAY_PORT), str(seconds)]
            self._relay = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert self._relay.stdout is not None
        self._relay.stdout.readline()  # it listens
        redirect = ("-p", "tcp", "-j", "REDIRECT", "--to-ports", str(_RELAY_PORT))
        self._on_switch("iptables", "-w", "-t", "nat", "-A", "PREROUTING", *redirect)

    def heal(self) -> None:
        """No loss and no partition any more."""
        self._on_switch("iptables", "-w", "-F", "FORWARD")

    # -- inside ------------------------------------------------------------------------------------

    def close(self) -> None:
        """Remove the namespaces, and with them the links."""
        if self._relay is not None:
            self._relay.kill()
            self._relay.wait()
            assert self._relay.stdout is not None
            self._relay.stdout.close()
        for name in (*self._namespaces.values(), self._switch):
            subprocess.run(["ip", "netns", "del", name], capture_output=True, check=False)

    def __enter__(self) -> Network:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _join(self, host: str) -> None:
        namespace, subnet = self._namespaces[host], self._subnets[host]
        _ip("netns", "add", namespace)
        _ip("link", "add", host, "netns", self._switch, "type", "veth", "peer", "eth0", "netns", namespace)
        _ip("-n", self._switch, "addr", "add", f"{subnet}.1/24", "dev", host)
        _ip("-n", self._switch, "link", "set", host, "up")
        _ip("-n", namespace, "addr", "add", f"{subnet}.2/24", "dev", "eth0")
        for device in ("lo", "eth0"):
            _ip("-n", namespace, "link", "set", device, "up")
        _ip("-n", namespace, "route", "add", "default", "via", f"{subnet}.1")

    def _filter(self, *rule: str) -> None:
        self._on_switch("iptables", "-w", "-A", "FORWARD", *rule)

    def _on_switch(self, *command: str) -> None:
        _ip("netns", "exec", self._switch, *command)


def _ip(*arguments: str) -> str:
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"ip {' '.join(arguments)}: {done.stderr.strip()}")
    return done.stdout


@contextmanager
def _entered(namespace: str) -> Iterator[None]:
    """The calling thread's network is that namespace's."""
    before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
    there = os.open(f"/run/netns/{namespace}", os.O_RDONLY)
    try:
        _set_namespace(there)
        yield
    finally:
        _set_namespace(before)
        os.close(there)
        os.close(before)


def _set_namespace(descriptor: int) -> None:
    if _libc.setns(descriptor, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
