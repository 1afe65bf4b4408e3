"""Hostile frames on every kind of socket, and hostile KV peers, with an honest question after each batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from msgspec.structs import replace

from tests.fuzz.attacker import Attacker
from tests.fuzz.event_frames import HostilePublisher, send_replay_requests, send_subscriptions
from tests.fuzz.findings import say
from tests.fuzz.kv_peers import send_peers
from tests.fuzz.mailbox_frames import send_directory_frames, send_frames
from tests.fuzz.raw_zmtp import knock_with_garbage
from tests.fuzz.target import Target
from wire.messages.directory import View, Watch
from wire.records import Role, WorkerRecord
from wire.security import curve_for

_BATCH = 25_000  # frames
_PEERS_BATCH = 100
_OTHER_MODEL = "fuzz"


def send_all_frames(target: Target, count: int) -> None:
    """`count` frames to each kind of socket."""
    for name, send in _KINDS.items():
        for start in range(0, count, _BATCH):
            before = target.findings.frames
            with _attacker(target) as attacker:
                send(target, attacker, min(_BATCH, count - start))
            target.running.settle()
            sent = target.findings.frames - before
            target.check(f"{sent} frames to {name}")
            say(f"frames: {sent} to {name}; {target.findings.line()}")


def send_all_peers(target: Target, count: int) -> None:
    """`count` hostile peers of the decode worker's KV channels."""
    (decode,), findings = target.running.decode, target.findings
    for start in range(0, count, _PEERS_BATCH):
        wanted = min(_PEERS_BATCH, count - start)
        sent = send_peers(decode.ready["mailbox"], 1000 + findings.peers, wanted, target.secret)
        findings.peers += sent
        if sent < wanted:
            findings.hangs += 1
            findings.tell(f"{decode.ready['id']} reserves nothing for a room")
        target.running.settle()
        target.check(f"{findings.peers} peers")
    say(f"peers: {target.findings.line()}")


@contextmanager
def _attacker(target: Target) -> Iterator[Attacker]:
    """One who is there for a batch. What it began ends some time after it has left."""
    running, seed = target.running, target.findings.frames + target.findings.peers
    names = (running.router.ready["mailbox"], *(worker.ready["mailbox"] for worker in running.workers))
    with Attacker(curve_for(target.secret), seed, names) as attacker:
        yield attacker


def _records(target: Target, attacker: Attacker) -> dict[Role, WorkerRecord]:
    """The honest workers, as the directory tells who asks."""
    with attacker.connect(_directory(target)) as socket:
        socket.send(attacker.frame_of(Watch(1)))
        view = attacker.wait_for(View)
    assert isinstance(view, View), "the directory answers a Watch"
    return {record.role: record for record in view.records if record.model == "m" and record.id != "liar"}


def _directory(target: Target) -> str:
    return str(target.running.directory.ready["mailbox"])


def _to_router(target: Target, attacker: Attacker, count: int) -> None:
    send_frames(attacker, target.running.router.ready["mailbox"], count, target.findings)


def _to_workers(target: Target, attacker: Attacker, count: int) -> None:
    for worker in target.running.workers:
        send_frames(attacker, worker.ready["mailbox"], count // 2, target.findings)


def _to_directory(target: Target, attacker: Attacker, count: int) -> None:
    some = next(iter(_records(target, attacker).values()))
    record = replace(some, id="fuzz", model=_OTHER_MODEL, incarnation=target.findings.frames)
    send_directory_frames(attacker, _directory(target), count, record, target.findings)


def _to_replay(target: Target, attacker: Attacker, count: int) -> None:
    for record in _records(target, attacker).values():
        send_replay_requests(attacker, record, count // 2, target.findings)


def _to_events(target: Target, attacker: Attacker, count: int) -> None:
    """Half of them to the workers' publishers, half to the router, which reads what a worker publishes."""
    records = _records(target, attacker)
    for record in records.values():
        send_subscriptions(attacker, record, target.running, count // 4, target.findings)
    with HostilePublisher(attacker, records[Role.PREFILL], _directory(target)) as publisher:
        publisher.publish(count // 2, target.findings)


def _to_ports(target: Target, attacker: Attacker, count: int) -> None:
    """One in fifty: each is a connection."""
    running = target.running
    addresses = [_directory(target), running.router.ready["mailbox"]]
    addresses += [worker.ready["mailbox"] for worker in running.workers]
    for record in _records(target, attacker).values():
        addresses += [record.events, record.replay]
    knock_with_garbage(addresses, count // 50, attacker.random, target.findings)


_KINDS: dict[str, Callable[[Target, Attacker, int], None]] = {
    "the router": _to_router,
    "workers": _to_workers,
    "the directory": _to_directory,
    "replay": _to_replay,
    "events": _to_events,
    "all ports, not in ZMTP": _to_ports,
}
