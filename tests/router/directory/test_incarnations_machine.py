"""Joins, restarts of the directory, lost, late and repeated messages, and processes that stop and wake up.

The network is a list of messages under way; the machine delivers, repeats and drops them in any order. What a
directory that has ended was sent is lost. A restarted directory settles for a lease, in which what is sent
arrives, as leases presuppose anywhere: processes that run announce themselves, and routers watch.

A process that was replaced may be taken again in one case: the newer one has never been in a View, and both
it and the directory that it joined have ended. Then nobody knows of it.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from router.directory.client import DirectoryClient
from router.directory.directory import Directory
from router.directory.server import DirectoryServer
from tests.router.directory.test_directory import record
from wire.mailbox import Mail
from wire.messages.any_message import AnyMessage
from wire.messages.directory import Announce, Join, Joined, Replaced, View, Withdraw

LEASE_S = 3.0
IDS = ("a", "b")
ROUTERS = ("router-0", "router-1")


@dataclass
class Process:
    """A worker process."""

    address: str
    worker: str
    nonce: int
    incarnation: int = 0
    runs: bool = True
    over: bool = False
    read: list[AnyMessage] = field(default_factory=list)  # while it is stopped nothing is read

    def next_message(self) -> AnyMessage:
        if not self.incarnation:
            return Join(self.worker, self.nonce)
        return Announce(record(self.worker, self.incarnation, mailbox=self.address), self.nonce)

    def take(self, message: AnyMessage) -> None:
        if isinstance(message, Joined) and message.nonce == self.nonce and not self.incarnation:
            self.incarnation = message.incarnation
        elif isinstance(message, Replaced):
            assert message.nonce == self.nonce
            self.over = True


class IncarnationsMachine(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.now = 0.0
        self.processes: dict[str, Process] = {}
        self.under_way: list[tuple[str, str, AnyMessage]] = []  # (sender, receiver, message)
        self.issued: dict[str, str] = {}  # id -> the process that this directory made its worker last
        self.seen: dict[str, int] = {}  # id -> the highest incarnation that a router has seen
        self.start_directory(settles_at=0.0)
        self.clients = {
            name: DirectoryClient("directory", lambda to, message, name=name: self.post(name, to, message))  # type: ignore[misc]
            for name in ROUTERS
        }

    def start_directory(self, settles_at: float) -> None:
        self.issued.clear()
        self.directory = Directory(LEASE_S, settles_at)
        self.server = DirectoryServer(self.directory, lambda to, message: self.post("directory", to, message))

    def post(self, sender: str, to: str, message: AnyMessage) -> None:
        self.under_way.append((sender, to, message))

    def deliver(self, sender: str, to: str, message: AnyMessage) -> None:
        if to == "directory":
            self.deliver_to_directory(sender, message)
        elif to in self.clients:
            assert isinstance(message, View)
            self.take_view(self.clients[to], message)
        elif self.processes[to].runs:
            self.processes[to].take(message)
        else:
            self.processes[to].read.append(message)

    def deliver_to_directory(self, sender: str, message: AnyMessage) -> None:
        at = len(self.under_way)
        self.server.take(Mail(sender, message), self.now)
        self.server.publish(self.now)
        for _, to, answer in self.under_way[at:]:
            if isinstance(answer, Joined):
                self.issued[answer.worker] = to

    def take_view(self, client: DirectoryClient, view: View) -> None:
        before = client.workers
        client.take(view)
        for worker, one in client.workers.items():
            if worker in before:
                assert one.incarnation >= before[worker].incarnation, "a zombie was taken"
            self.seen[worker] = max(one.incarnation, self.seen.get(worker, 0))

    @rule(worker=st.sampled_from(IDS))
    def start_process(self, worker: str) -> None:
        address = f"process-{len(self.processes)}"
        self.processes[address] = Process(address, worker, nonce=len(self.processes) + 1)

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def speak(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from([*self.processes.values()]))
        if process.runs and not process.over:
            self.post(process.address, "directory", process.next_message())

    @rule(name=st.sampled_from(ROUTERS))
    def watch(self, name: str) -> None:
        self.now += 1.0
        self.clients[name].tick(self.now)

    @precondition(lambda self: self.under_way)
    @rule(data=st.data(), fate=st.sampled_from(["deliver", "deliver", "deliver", "repeat", "drop"]))
    def move_on(self, data: st.DataObject, fate: str) -> None:
        at = data.draw(st.integers(0, len(self.under_way) - 1))
        sender, to, message = self.under_way[at]
        if fate != "repeat":
            del self.under_way[at]
        if fate != "drop":
            self.deliver(sender, to, message)

    @rule()
    def deliver_everything(self) -> None:
        while self.under_way:
            self.deliver(*self.under_way.pop(0))

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def stop_or_wake(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from([*self.processes.values()]))
        process.runs = not process.runs
        if process.runs:
            if process.incarnation and not process.over:  # it announces itself before it reads
                self.post(process.address, "directory", process.next_message())
            for message in process.read:
                process.take(message)
            process.read.clear()

    @precondition(lambda self: self.processes)
    @rule(data=st.data())
    def withdraw(self, data: st.DataObject) -> None:
        process = data.draw(st.sampled_from([*self.processes.values()]))
        if process.runs and process.incarnation and not process.over:
            process.over = True
            self.post(process.address, "directory", Withdraw(process.worker, process.incarnation))

    @rule(seconds=st.sampled_from([0.5, 2.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.server.tick(self.now)

    @rule(data=st.data())
    def restart_directory(self, data: st.DataObject) -> None:
        self.under_way = [one for one in self.under_way if one[1] in ROUTERS]
        for sender, to, message in list(self.under_way):  # none is under way for a lease, but for repeats
            self.deliver(sender, to, message)
        self.start_directory(self.now + LEASE_S)
        speaking = [p for p in self.processes.values() if p.runs and p.incarnation and not p.over]
        mail = [(p.address, p.next_message()) for p in speaking]
        for client in self.clients.values():
            client.tick(self.now + 1.0)
        mail += [(sender, message) for sender, to, message in self.under_way if to == "directory"]
        self.under_way = [one for one in self.under_way if one[1] in ROUTERS]
        for sender, message in data.draw(st.permutations(mail)):
            self.deliver(sender, "directory", message)
        self.now += LEASE_S
        for process in speaking:  # those that are not told that they are over go on
            self.deliver(process.address, "directory", process.next_message())
        self.server.tick(self.now)

    @invariant()
    def the_directory_lists_the_newest(self) -> None:
        if self.now < self.directory.settles_at:
            return
        records = self.directory.records()
        assert len({one.id for one in records}) == len(records)
        for one in records:
            assert one.incarnation >= self.seen.get(one.id, 0), "a process that was replaced is listed"
            assert one.mailbox == self.issued.get(one.id, one.mailbox), "another than the last that joined"

    @rule(worker=st.sampled_from(IDS))
    def the_newest_gets_in(self, worker: str) -> None:
        """When messages arrive, the process that joins last is the worker, in every view."""
        self.start_process(worker)
        self.deliver_everything()
        (*_, process) = self.processes.values()
        for _ in range(2):
            self.post(process.address, "directory", process.next_message())
            self.deliver_everything()
        assert not process.over
        self.now += 1.0
        for client in self.clients.values():
            client.tick(self.now)
        self.deliver_everything()
        for client in self.clients.values():
            assert client.workers[process.worker].mailbox == process.address


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "router.directory.server")


def test_a_zombie_is_never_the_worker() -> None:
    run_state_machine_as_test(IncarnationsMachine, settings=settings(max_examples=60, stateful_step_count=40))


@pytest.mark.invariants
def test_a_zombie_is_never_the_worker_in_long_runs() -> None:
    run_state_machine_as_test(
        IncarnationsMachine, settings=settings(max_examples=2000, stateful_step_count=60)
    )
