"""A mailbox reports which peers answer: killed, stopped, cut off and busy processes, over real sockets."""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import zmq

from tests.support.members import SECRET, curve_of
from tests.support.other_host import other_host, why_no_other_host
from wire.addresses import parse_address
from wire.loop_mailbox import LoopMailbox
from wire.mailbox import Mailbox
from wire.messages.caches import Inspected
from wire.messages.directory import Watch
from wire.peer_monitors import PeerState
from wire.sockets import PeerSockets

ROOT = Path(__file__).resolve().parents[2]
DETECTED_S = 6.0  # 2 on a machine that is not busy with other tests
PATIENCE_S = 20.0
UP, DOWN = PeerState.UP, PeerState.DOWN

PEER = """
import ctypes, sys
from wire.mailbox import Mailbox
from tests.support.members import curve_of
mailbox = Mailbox(sys.argv[2], curve_of(sys.argv[1] or None))
print(mailbox.address, flush=True)
for line in sys.stdin:
    ctypes.PyDLL(None).usleep(int(float(line) * 1e6))  # PyDLL keeps the GIL
    print("awake", flush=True)
"""


class Peer:
    """A process with a mailbox."""

    def __init__(self, secret: str = "", interface: str = "127.0.0.1", under: tuple[str, ...] = ()) -> None:
        self.process = subprocess.Popen(
            [*under, sys.executable, "-c", PEER, secret, interface],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().strip()

    def hold_gil(self, seconds: float) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{seconds}\n")
        self.process.stdin.flush()

    def until_awake(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "awake\n"

    def close(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def peer(secret: str = "", interface: str = "127.0.0.1", under: tuple[str, ...] = ()) -> Iterator[Peer]:
    one = Peer(secret, interface, under)
    try:
        yield one
    finally:
        one.close()


def until(mailbox: Mailbox, address: str, state: PeerState) -> float:
    """Seconds until the mailbox has reported the state, as the next report about this peer."""
    began = time.monotonic()
    while time.monotonic() - began < PATIENCE_S:
        mailbox.wait(0.02)
        found = mailbox.take_peers().get(address)
        if found is not None:
            assert found is state
            return time.monotonic() - began
    raise AssertionError(f"{address} was not reported {state}")


@pytest.fixture(params=["", SECRET])
def secret(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


def test_a_stopped_peer_is_down_and_up_again_when_it_goes_on(secret: str) -> None:
    with Mailbox(curve=curve_of(secret or None)) as mailbox, peer(secret) as there:
        mailbox.watch(frozenset({there.address}))
        until(mailbox, there.address, UP)
        os.kill(there.process.pid, signal.SIGSTOP)
        assert until(mailbox, there.address, DOWN) < DETECTED_S
        os.kill(there.process.pid, signal.SIGCONT)
        until(mailbox, there.address, UP)


def test_a_killed_peer_is_down(secret: str) -> None:
    with Mailbox(curve=curve_of(secret or None)) as mailbox, peer(secret) as there:
        mailbox.send(there.address, Watch())
        until(mailbox, there.address, UP)
        there.process.kill()
        assert until(mailbox, there.address, DOWN) < DETECTED_S


def test_a_peer_that_is_stopped_while_it_is_sent_much_is_down() -> None:
    with Mailbox() as mailbox, peer() as there:
        mailbox.watch(frozenset({there.address}))
        until(mailbox, there.address, UP)
        os.kill(there.process.pid, signal.SIGSTOP)
        for number in range(64):  # more than the kernel's buffers take: no heartbeat can leave
            mailbox.send(there.address, Inspected(number, "x" * (1 << 20)))
        assert until(mailbox, there.address, DOWN) < DETECTED_S


def test_nobody_at_an_address_is_down_at_once() -> None:
    with peer() as there:
        address = there.address
    with Mailbox() as mailbox:
        mailbox.watch(frozenset({address}))
        assert until(mailbox, address, DOWN) < DETECTED_S


def test_a_peer_that_stays_down_holds_no_descriptors() -> None:
    with peer() as there:
        address = there.address
    told: list[tuple[str, PeerState]] = []
    context = zmq.Context()
    sockets = PeerSockets(context, "tcp://127.0.0.1:1", None, lambda *state: told.append(state))
    context.socket(zmq.PUSH).close()  # the context's own descriptors come with its first socket
    before = len(os.listdir("/proc/self/fd"))
    sockets.send(address, Watch())
    sockets.flush()
    deadline = time.monotonic() + PATIENCE_S
    while not told and time.monotonic() < deadline:
        sockets.check(time.monotonic())
        time.sleep(0.02)
    assert told == [(address, DOWN)]
    assert len(os.listdir("/proc/self/fd")) > before
    sockets.check(time.monotonic() + 60.0)
    while len(os.listdir("/proc/self/fd")) > before:  # ZeroMQ closes a socket on a thread of its own
        assert time.monotonic() < deadline
        time.sleep(0.02)
    sockets.close()
    context.destroy(linger=0)


def test_hundreds_of_peers_are_watched() -> None:
    with peer() as there:
        address = there.address
        port = int(parse_address(address).endpoint.rpartition(":")[2])
        others = {f"tcp://127.0.1.{n % 250 + 1}:{port + n // 250}" for n in range(500)}  # nobody is there
        with Mailbox() as mailbox:
            mailbox.watch(frozenset({address, *others}))
            until(mailbox, address, UP)
            assert mailbox.running


def test_another_process_at_a_peers_address_is_down() -> None:
    with Mailbox(curve=curve_of()) as mailbox, peer(SECRET) as there:
        endpoint, key = there.address.rsplit("/", 1)
        of_another = f"{endpoint}/{key[::-1]}"
        mailbox.watch(frozenset({of_another}))
        until(mailbox, of_another, DOWN)


def test_a_peer_that_holds_the_gil_is_not_down() -> None:
    with Mailbox(curve=curve_of()) as mailbox, peer(SECRET) as there:
        mailbox.watch(frozenset({there.address}))
        until(mailbox, there.address, UP)
        there.hold_gil(4.0)
        there.until_awake()
        mailbox.wait(0.5)
        assert mailbox.take_peers() == {}


def test_a_mailbox_that_held_the_gil_itself_reports_nobody_down() -> None:
    with Mailbox() as mailbox, peer() as there:
        mailbox.watch(frozenset({there.address}))
        until(mailbox, there.address, UP)
        ctypes.PyDLL(None).usleep(4_000_000)
        mailbox.wait(1.5)
        assert mailbox.take_peers() == {}


def test_a_process_that_was_stopped_itself_reports_nobody_down() -> None:
    program = """
import sys, time
from wire.mailbox import Mailbox
mailbox = Mailbox()
mailbox.watch(frozenset({sys.argv[1]}))
while not mailbox.take_peers():
    mailbox.wait(0.05)
print("up", flush=True)
sys.stdin.readline()
mailbox.wait(2.0)
print(mailbox.take_peers(), flush=True)
"""
    with peer() as there:
        watcher = subprocess.Popen(
            [sys.executable, "-c", program, there.address],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT,
        )  # fmt: skip
        assert watcher.stdout is not None
        assert watcher.stdout.readline() == "up\n"
        os.kill(watcher.pid, signal.SIGSTOP)
        time.sleep(4.0)  # longer than any bound of either side
        os.kill(watcher.pid, signal.SIGCONT)
        said, _ = watcher.communicate("\n", timeout=PATIENCE_S)
        assert said == "{}\n"


def test_on_a_loop_peers_are_reported_too(secret: str) -> None:
    async def run(there: Peer) -> None:
        seen: asyncio.Queue[tuple[str, PeerState]] = asyncio.Queue()
        mailbox = LoopMailbox(
            "127.0.0.1", curve_of(secret or None), lambda _: None, lambda *told: seen.put_nowait(told)
        )
        mailbox.watch(frozenset({there.address}))
        for state, act in ((UP, signal.SIGSTOP), (DOWN, signal.SIGCONT), (UP, signal.SIGKILL), (DOWN, None)):
            assert await asyncio.wait_for(seen.get(), PATIENCE_S) == (there.address, state)
            if act is not None:
                os.kill(there.process.pid, act)
        mailbox.forget(there.address)
        mailbox.close()

    with peer(secret) as there:
        asyncio.run(run(there))


@pytest.mark.skipif(why_no_other_host() != "", reason=why_no_other_host())
def test_a_peer_behind_a_cut_cable_is_down_and_up_again() -> None:
    with other_host() as host, Mailbox() as mailbox, peer("", host.address, host.command) as there:
        mailbox.watch(frozenset({there.address}))
        until(mailbox, there.address, UP)
        host.set_cable("down")
        assert until(mailbox, there.address, DOWN) < DETECTED_S
        host.set_cable("up")
        until(mailbox, there.address, UP)
