"""A port that was used rests: whoever used it was closed or killed, is of this user or another."""

from __future__ import annotations

import json
import math
import os
import signal
import socket
import subprocess
import sys
from contextlib import ExitStack, closing
from pathlib import Path

import hypothesis.strategies as st
import pytest
from filelock import FileLock
from hypothesis import HealthCheck, given, settings

from common import used_ports
from common.ports import Ports, bind_free
from common.used_ports import REST_S, known_ports, only_fresh

HOST = "127.0.0.77"  # an address of this test's own
RANGE = Ports("28500-28505", "ports.kv")
ROOT = Path(__file__).parents[2]
HOLD = """
import socket, sys
from common.ports import Ports, bind_free
sock = socket.socket()
bind_free(Ports(sys.argv[2]), sys.argv[1], lambda port: sock.bind((sys.argv[1], port)))
print(sock.getsockname()[1], flush=True)
sys.stdin.read()
"""


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The record is there, for processes that the test starts, too."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr("tempfile.tempdir", None)
    return tmp_path


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(used_ports, "_since_boot", clock)
    return clock


def taken(ports: Ports = RANGE) -> socket.socket:
    sock = socket.socket()
    try:
        bind_free(ports, HOST, lambda port: sock.bind((HOST, port)))
    except BaseException:
        sock.close()
        raise
    return sock


def used(ports: Ports = RANGE) -> int:
    """A port that a socket had for a moment."""
    with closing(taken(ports)) as sock:
        return int(sock.getsockname()[1])


def record(directory: Path, user: int | None = None) -> Path:
    """The file of a user, which is made if there is none."""
    with known_ports(HOST, range(0)):
        pass
    (own,) = directory.glob(f"baton-ports-*.{os.getuid()}")
    return own if user is None else own.with_suffix(f".{user}")


def test_each_port_is_used_once_before_any_is_used_again(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    ports = []
    for _ in RANGE.choice:
        ports.append(used())
        clock.now += 1.0
    assert sorted(ports) == list(RANGE.choice)
    assert caplog.messages == []
    assert [used() for _ in range(2)] == ports[:2], "of a range that is used up, the longest unused first"
    assert f"port {ports[0]} of {HOST} was used less than 120 s ago" in caplog.messages[0]


def test_a_port_has_rested_after_two_of_the_longest_leases(clock: Clock) -> None:
    ports = Ports("28500-28501")
    first, second = used(ports), used(ports)
    clock.now += REST_S - 1.0
    with known_ports(HOST, ports.choice) as known:
        assert (known.fresh, sorted(known.resting)) == ([], sorted([first, second]))
    clock.now += REST_S
    with known_ports(HOST, ports.choice) as known:
        assert (sorted(known.fresh), known.resting) == ([28500, 28501], [])


def test_the_port_of_a_process_that_is_killed_rests_from_when_that_is_seen(clock: Clock) -> None:
    """However long ago it took it."""
    command = [sys.executable, "-c", HOLD, HOST, RANGE.text]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    assert process.stdout is not None
    port = int(process.stdout.readline())
    clock.now += 1e9  # the boot is long over for this process, and was not for that one
    with known_ports(HOST, RANGE.choice) as known:
        assert known.taken == [port]
    clock.now += 10 * REST_S
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20.0)
    others = {used() for _ in range(len(RANGE.choice) - 1)}
    assert others == set(RANGE.choice) - {port}


def test_a_port_is_of_one_address(clock: Clock) -> None:
    port = used(Ports("28500"))
    with known_ports("127.0.0.78", range(port, port + 1)) as known:
        assert known.fresh == [port]


def test_what_other_users_use_is_known(directory: Path, clock: Clock) -> None:
    theirs = record(directory, user=4242)
    theirs.write_text(json.dumps({f"{HOST}:28500": [clock.now, True], f"{HOST}:28501": [clock.now, False]}))
    clock.now += 1.0
    with known_ports(HOST, RANGE.choice) as known:
        assert sorted(known.resting) == [28500, 28501]
    for _ in range(3):  # their file still says that 28500 is in use
        clock.now += REST_S
        with known_ports(HOST, RANGE.choice) as known:
            assert known.resting == []


def test_a_time_to_come_means_now(directory: Path, clock: Clock) -> None:
    record(directory, user=4242).write_text(json.dumps({f"{HOST}:28500": [clock.now + 1e9, False]}))
    with known_ports(HOST, RANGE.choice) as known:
        assert known.resting == [28500]
    record(directory, user=4242).unlink()
    clock.now += REST_S
    with known_ports(HOST, RANGE.choice) as known:
        assert known.resting == []


@pytest.mark.parametrize(
    "text", ["", "[]", "{", '{"a": 1}', '{"a": [1]}', '{"a": ["x", true]}', '{"a": [NaN, true]}', "\xff"]
)
def test_a_record_that_is_spoilt_says_nothing(
    directory: Path, caplog: pytest.LogCaptureFixture, text: str
) -> None:
    record(directory, user=4242).write_text(text, encoding="latin-1")
    assert used() != used()
    assert "4242 does not say which ports were used" in caplog.messages[0]


def test_a_link_or_a_pipe_in_place_of_a_record_is_not_followed(
    directory: Path, caplog: pytest.LogCaptureFixture
) -> None:
    record(directory, user=4242).symlink_to("/dev/zero")
    os.mkfifo(record(directory, user=4243))
    used()
    said = "".join(caplog.messages)
    assert "4242 does not say" in said
    assert "4243 does not say" in said


def test_a_record_can_be_read_by_all_users_and_is_this_users(directory: Path) -> None:
    before = os.umask(0o077)
    try:
        used()
    finally:
        os.umask(before)
    about = record(directory).stat()
    assert (about.st_mode & 0o777, about.st_uid) == (0o644, os.getuid())


def test_without_a_place_for_the_record_a_port_is_taken_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with closing(taken()) as sock:
        assert sock.getsockname()[1] in RANGE.choice
    assert "without the record of those that were used" in caplog.messages[0]


def test_a_process_that_keeps_the_lock_is_not_waited_for_without_a_bound(
    directory: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(used_ports, "_LOCK_S", 0.1)
    with FileLock(f"{record(directory)}.lock"), closing(taken()) as sock:
        assert sock.getsockname()[1] in RANGE.choice
    assert "could not be acquired" in caplog.messages[0]


def test_processes_that_start_at_once_have_ports_of_their_own() -> None:
    command = [sys.executable, "-c", HOLD, HOST, RANGE.text]
    processes = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for _ in RANGE.choice
    ]
    ports = [int(process.communicate(timeout=60.0)[0]) for process in processes]  # each holds it until then
    assert sorted(ports) == list(RANGE.choice)


def test_a_library_that_takes_ports_itself_finds_no_used_one(
    clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    def free() -> set[int]:
        """What can be bound, as Mooncake tries it."""
        found = set()
        for port in RANGE.choice:
            with socket.socket() as sock:
                try:
                    sock.bind(("0.0.0.0", port))
                except OSError:
                    continue
                found.add(port)
        return found

    before = used(), used()
    with only_fresh(HOST, RANGE.choice, 2):
        assert free() == set(RANGE.choice) - set(before)
    assert free() == set(RANGE.choice)
    clock.now += 1.0
    for _ in range(3):
        used()
    assert caplog.messages == []
    with only_fresh(HOST, RANGE.choice, 2):
        assert len(free()) == 2
    assert any(f"port {port} of" in caplog.messages[0] for port in before)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(steps=st.lists(st.one_of(st.none(), st.integers(0, 5), st.floats(1.0, REST_S)), max_size=30))
def test_a_port_that_was_used_is_taken_only_when_no_other_is_left(
    steps: list[int | float | None], clock: Clock
) -> None:
    """None: a socket comes. An integer: one of those that are there goes. Else: seconds pass."""
    clock.now += 1e6  # what the examples before this one used has rested,
    with known_ports(HOST, RANGE.choice):
        clock.now += 1e6  # and was seen to be free
    ended: dict[int, float] = {}
    with ExitStack() as until_here:
        sockets: dict[int, socket.socket] = {}
        for step in steps:
            if isinstance(step, float):
                clock.now += step
            elif step is not None and step < len(sockets):
                port = sorted(sockets)[step]
                sockets.pop(port).close()
                ended[port] = clock.now
            elif step is None and len(sockets) < len(RANGE.choice):
                sock = until_here.enter_context(closing(taken()))
                port = sock.getsockname()[1]
                if set(RANGE.choice) - set(sockets) - set(ended):
                    assert clock.now - ended.get(port, -math.inf) >= REST_S
                sockets[port] = sock
