from __future__ import annotations

import threading
import time
from contextlib import ExitStack
from typing import Any

import pytest

from router.directory.client import DirectoryClient
from router.directory.directory import Directory
from router.directory.incarnations import Incarnations
from router.directory.server import DirectoryHost, DirectoryServer, RoleOrders
from tests.support.fake_worker import FakeWorker, group_layout
from tests.support.members import SECRET, curve_of, secret_of
from wire.mailbox import Mail, Mailbox
from wire.messages.any_message import AnyMessage
from wire.messages.directory import (
    Announce,
    Announced,
    AnnounceRefused,
    Join,
    Joined,
    Replaced,
    View,
    Watch,
    Withdraw,
)
from wire.records import GroupLayout, Role, WorkerRecord
from wire.settings import ModelWeights, Settings


def record(worker: str = "p0", incarnation: int = 1, **changes: Any) -> WorkerRecord:
    base: dict[str, Any] = {
        "id": worker, "incarnation": incarnation, "role": Role.PREFILL, "mailbox": f"tcp://{worker}",
        "events": "", "replay": "", "model": "m", "fingerprint": "f", "groups": (group_layout(),),
        "max_context_tokens": 100, "total_tokens": 100, "max_running_requests": 1, "pid": 1, "host": "h",
        "transfer_backends": ("shm",),
    }  # fmt: skip
    return WorkerRecord(**{**base, **changes})


def test_a_lease_is_renewed_or_ends() -> None:
    directory = Directory(lease_s=3.0)
    first = directory.version
    assert directory.announce(Announce(record()), now=0.0) == Announced("p0", 1, 3.0)
    assert directory.version == first + 1
    directory.announce(Announce(record()), now=2.0)
    assert directory.version == first + 1  # a renewal is no change of membership
    assert directory.expire(now=4.9) == []
    assert [r.id for r in directory.expire(now=5.0)] == ["p0"]
    assert directory.version == first + 2
    assert directory.records() == []


def test_a_directory_that_was_stopped_does_not_blame_the_workers() -> None:
    directory = Directory(lease_s=3.0)
    directory.announce(Announce(record()), now=0.0)
    assert directory.expire(now=0.5) == []
    assert directory.expire(now=10.5) == [], "renewals may wait unread"
    assert [directory.expire(now=10.5 + 0.5 * step) for step in range(1, 5)] == [[]] * 4
    assert [r.id for r in directory.expire(now=13.0)] == ["p0"]


def test_a_worker_is_lost_a_lease_after_its_own_unless_it_comes_back_or_has_left() -> None:
    directory = Directory(lease_s=3.0)

    def look(until: float) -> dict[str, float]:
        """When each worker was lost."""
        lost: dict[str, float] = {}
        while (now := look_at[-1] + 0.5) <= until:
            look_at.append(now)
            directory.expire(now)
            lost |= {record.id: now for record in directory.lost(now)}
        return lost

    look_at = [-0.5]
    for worker in ("gone", "back", "left"):
        directory.announce(Announce(record(worker)), now=0.0)
    assert look(until=4.0) == {}
    assert directory.records() == []
    directory.announce(Announce(record("back")), now=4.0)
    directory.withdraw(Withdraw("left", 1))
    assert look(until=6.5) == {"gone": 6.0}
    assert look(until=12.0) == {"back": 10.0}
    assert look(until=20.0) == {}


def test_draining_and_a_restart_change_the_version() -> None:
    directory = Directory(3.0)
    directory.announce(Announce(record()), 0.0)
    before = directory.version
    directory.announce(Announce(record(draining=True)), 0.1)
    directory.announce(Announce(record(incarnation=2)), 0.2)
    assert directory.version == before + 2
    assert [r.incarnation for r in directory.records()] == [2]


def test_only_its_own_incarnation_withdraws_a_worker() -> None:
    directory = Directory(3.0)
    directory.announce(Announce(record(incarnation=2)), 0.0)
    assert not directory.withdraw(Withdraw("p0", 1))
    assert directory.withdraw(Withdraw("p0", 2))
    assert directory.records() == []


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("page_size", {"groups": (group_layout(page_size=32),)}),
        ("dtype", {"groups": (group_layout(dtype="bfloat16"),)}),
        ("kv_cache_dtype", {"groups": (group_layout(dtype="fp8_e4m3:scale=1"),)}),
        ("tile_order", {"groups": (group_layout(tile_order="dot_pairs"),)}),
        ("model", {"groups": (group_layout(kind="window"),)}),
        ("model", {"groups": ()}),
    ],
)
def test_a_worker_that_cannot_exchange_pages_is_refused(key: str, changes: dict[str, Any]) -> None:
    directory = Directory(3.0)
    directory.announce(Announce(record("p0")), 0.0)
    refused = directory.announce(Announce(record("d0", **changes)), 0.1)
    assert isinstance(refused, AnnounceRefused)
    assert refused.key == key
    assert "'p0'" in refused.problem
    assert key in refused.remedy
    assert [r.id for r in directory.records()] == ["p0"]
    for worker, another in (
        ("d1", {"model": "n"}),
        ("d2", {"version": "canary"}),
        ("d3", {"fingerprint": "o"}),
    ):
        answer = directory.announce(Announce(record(worker, **{**changes, **another})), 0.1)
        mistaken = key == "dtype" and "fingerprint" in another  # a dtype changes the fingerprint, too
        assert isinstance(answer, AnnounceRefused if mistaken else Announced)


def test_two_versions_of_a_model_live_side_by_side() -> None:
    directory = Directory(3.0)
    for worker, fingerprint in (("p0", "old"), ("d0", "old"), ("p1", "new"), ("d1", "new")):
        announced = directory.announce(Announce(record(worker, fingerprint=fingerprint)), 0.0)
        assert isinstance(announced, Announced)
    assert [one.fingerprint for one in directory.records()] == ["old", "old", "new", "new"]


def test_a_refused_worker_may_join_when_the_other_is_gone() -> None:
    directory = Directory(3.0)
    directory.announce(Announce(record("p0")), 0.0)
    odd = Announce(record("d0", groups=(group_layout(page_size=32),)))
    assert isinstance(directory.announce(odd, 0.1), AnnounceRefused)
    directory.expire(3.0)
    assert isinstance(directory.announce(odd, 3.1), Announced)


def join(directory: Directory, worker: str, nonce: int, now: float = 0.0) -> int:
    joined = directory.join(Join(worker, nonce), now)
    assert isinstance(joined, Joined)
    return joined.incarnation


def test_the_last_process_that_joins_under_an_id_replaces_the_others_at_once() -> None:
    directory = Directory(3.0)
    first = join(directory, "w", nonce=11)
    assert join(directory, "w", nonce=11) == first, "a repeated Join gets the same"
    old = Announce(record("w", first), 11)
    assert isinstance(directory.announce(old, 0.1), Announced)
    second = join(directory, "w", nonce=12)
    assert second > first
    assert directory.records() == [], "the older is gone before the newer announces itself"
    assert directory.announce(old, 0.2) == Replaced("w", 11)
    assert directory.join(Join("w", 11), 0.2) == Replaced("w", 11)
    assert isinstance(directory.announce(Announce(record("w", second), 12), 0.3), Announced)
    directory.expire(4.0)
    assert directory.announce(old, 4.0) == Replaced("w", 11), "also when the newer is gone"
    assert isinstance(directory.announce(Announce(record("w", second), 12), 4.1), Announced)
    directory.withdraw(Withdraw("w", second))
    assert directory.announce(Announce(record("w", second), 12), 4.2) == Replaced("w", 12), "it comes late"


def test_a_directory_that_was_restarted_issues_nothing_below_what_was_seen() -> None:
    directory = Directory(3.0, settles_at=10.0)
    assert directory.join(Join("new", 1), 9.9) is None
    assert isinstance(directory.announce(Announce(record("a", 7), 5), 8.0), Announced)
    directory.remember({"gone": 9, "b": 4})
    assert directory.announce(Announce(record("b", 3), 6), 9.0) == Replaced("b", 6)
    assert isinstance(directory.announce(Announce(record("b", 4), 8), 9.0), Announced)
    assert join(directory, "new", 1, now=10.0) == 10
    assert join(directory, "a", 2, now=10.0) == 11
    assert directory.announce(Announce(record("a", 7), 5), 10.1) == Replaced("a", 5)


def test_what_nobody_told_a_restarted_directory_in_time_is_older_than_what_it_issues() -> None:
    directory = Directory(3.0)
    assert join(directory, "w", 1) == 1
    directory.remember({"w": 5})
    assert directory.announce(Announce(record("w", 5), 3), 0.1) == Replaced("w", 3)
    assert isinstance(directory.announce(Announce(record("w", 1), 1), 0.2), Announced)
    assert directory.announce(Announce(record("w", 1), 3), 0.3) == Replaced("w", 3), "an equal number"
    assert join(directory, "x", 2) == 6


def test_incarnations_of_ids_that_are_long_gone_are_forgotten() -> None:
    incarnations = Incarnations(0.0)
    for number in range(100_010):
        incarnations.remember({str(number): number})
    incarnations.forget(live={"0", "1"})
    assert not incarnations.admit(Announce(record("0", -1))), "it is live"
    assert incarnations.admit(Announce(record("2", -1))), "it was forgotten"
    assert not incarnations.admit(Announce(record("12", 11)))


def view(watch: int, version: int, *records: WorkerRecord) -> View:
    return View(watch, version, list(records))


def test_a_client_takes_a_restarted_directory_whatever_its_version() -> None:
    client = DirectoryClient("d", lambda *_: None)
    change = client.take(view(1, 9, record("a"), record("b")))
    assert [r.id for r in change.joined] == ["a", "b"]
    change = client.take(view(2, 0, record("a"), record("c")))
    assert ([r.id for r in change.lost], [r.id for r in change.joined]) == (["b"], ["c"])
    change = client.take(view(1, 10, record("a"), record("b")))
    assert (change.lost, change.joined, sorted(client.workers)) == ([], [], ["a", "c"]), "it comes late"


def test_a_client_ignores_a_late_view_and_sees_restarted_workers_as_lost_and_joined() -> None:
    client = DirectoryClient("d", lambda *_: None)
    client.take(view(1, 5, record("a")))
    client.take(view(1, 4))
    assert list(client.workers) == ["a"]
    change = client.take(view(1, 6, record("a", incarnation=2)))
    assert [r.incarnation for r in change.lost] == [1]
    assert [r.incarnation for r in change.joined] == [2]


def test_a_client_tells_the_highest_incarnations_that_it_has_seen() -> None:
    sent: list[AnyMessage] = []
    client = DirectoryClient("d", lambda _to, message: sent.append(message))
    client.take(view(1, 1, record("a", 7), record("b", 3)))
    client.take(view(1, 2, record("a", 8)))
    client.tick(0.0)
    client.take(view(1, 3, *(record(f"w{number}", number) for number in range(10, 310))))
    client.tick(2.0)
    first, second = sent
    assert first == Watch(1, {"a": 8, "b": 3})
    assert isinstance(second, Watch)
    assert sorted(second.seen.values()) == list(range(54, 310))


def test_a_client_repeats_its_watch() -> None:
    sent: list[tuple[str, object]] = []
    client = DirectoryClient("d", lambda to, message: sent.append((to, message)))
    for now in (0.0, 0.5, 1.1):
        client.tick(now)
    client.move("e")
    client.tick(1.2)
    assert sent == [("d", Watch(1)), ("d", Watch(2)), ("e", Watch(3))]


@pytest.mark.parametrize("secret", [None, SECRET])
def test_over_mailboxes_a_dead_worker_leaves_the_view(secret: str | None) -> None:
    with (
        DirectoryHost(secret=secret_of(secret), lease_s=0.5) as host,
        Mailbox(curve=curve_of(secret)) as watcher,
    ):
        worker = FakeWorker(Role.DECODE, host.address, secret=secret, announce_s=0.1)
        assert worker.leased.wait(5)
        watcher.send(host.address, Watch())
        assert ids_seen(watcher, lambda ids: ids == [worker.record.id])
        worker.die()
        assert ids_seen(watcher, lambda ids: ids == [])


def test_workers_that_join_together_are_told_together() -> None:
    """A View for each of 200 workers would list all of them each time."""
    views = 0
    with DirectoryHost() as host, Mailbox() as watcher, Mailbox() as workers:
        watcher.send(host.address, Watch())
        assert ids_seen(watcher, lambda ids: ids == [])
        for number in range(200):
            one = record(f"w{number}", mailbox=workers.address)
            workers.send(host.address, Announce(one, nonce=number + 1))
        deadline, seen = time.monotonic() + 5, 0
        while seen < 200 and time.monotonic() < deadline:
            told = [mail.message for mail in watcher.wait(0.2) if isinstance(mail.message, View)]
            views += len(told)
            seen = max([seen, *(len(view.records) for view in told)])
    assert seen == 200
    assert views <= 40


def ids_seen(watcher: Mailbox, good: Any) -> bool:
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        for mail in watcher.wait(0.2):
            if isinstance(mail.message, View) and good([r.id for r in mail.message.records]):
                return True
    return False


def test_a_restarted_directory_sends_no_view_before_its_workers_could_announce_themselves() -> None:
    sent: list[tuple[str, list[str]]] = []

    def send(to: str, message: AnyMessage) -> None:
        if isinstance(message, View):
            sent.append((to, [one.id for one in message.records]))

    server = DirectoryServer(Directory(3.0, settles_at=3.0), send)
    server.take(Mail("router", Watch()), 0.5)
    server.publish(0.5)
    server.take(Mail("tcp://p0", Announce(record())), 1.0)
    server.publish(1.0)
    server.tick(2.9)
    assert sent == []
    server.tick(3.0)
    assert sent == [("router", ["p0"])]


@pytest.mark.parametrize("is_new", [True, False])
def test_over_mailboxes_a_process_that_was_replaced_is_told(is_new: bool) -> None:
    with DirectoryHost(lease_s=0.5, is_new=is_new) as host, ExitStack() as cleanup:
        first = FakeWorker(Role.DECODE, host.address, worker_id="w", announce_s=0.1)
        cleanup.callback(first.close)
        assert first.leased.wait(5)
        second = FakeWorker(Role.DECODE, host.address, worker_id="w", announce_s=0.1)
        cleanup.callback(second.close)
        assert second.leased.wait(5)
        assert first.replaced.wait(5)
        assert first.record.incarnation < second.record.incarnation
        assert not second.replaced.is_set()


@pytest.mark.parametrize("failing", ["mailbox", "roles"])
def test_a_thread_that_fails_ends_the_directory_and_no_worker(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody reads the renewals of their leases any more."""
    lost: list[str] = []
    failed, broken = threading.Event(), threading.Event()

    def assign(_records: object, _settings: object, _now: float) -> RoleOrders:
        if broken.is_set() and failing == "roles":
            raise RuntimeError("a bug")
        return RoleOrders()

    with ExitStack() as cleanup:
        host = DirectoryHost(
            lease_s=0.3,
            on_lost=lambda record: lost.append(record.id),
            assign_roles=assign,
            on_failed=failed.set,
        )
        cleanup.callback(host.close)
        worker = FakeWorker(Role.DECODE, host.address, announce_s=0.05)
        cleanup.callback(worker.close)
        assert worker.leased.wait(5)
        if failing == "mailbox":
            monkeypatch.setattr(Mailbox, "running", False)
        broken.set()
        assert failed.wait(5)
        host._thread.join(5)
        assert not host._thread.is_alive()
    assert lost == []


def test_every_view_says_who_watches() -> None:
    sent: list[tuple[str, list[str]]] = []

    def send(to: str, message: object) -> None:
        assert isinstance(message, View)
        sent.append((to, message.routers))

    server = DirectoryServer(Directory(3.0), send)
    server.tick(0.0)
    server.take(Mail("one", Watch()), 0.0)
    server.publish(0.0)
    server.take(Mail("two", Watch()), 1.0)
    server.publish(1.0)
    assert ("one", ["one", "two"]) in sent, "the first is told at once"
    assert ("two", ["one", "two"]) in sent
    sent.clear()
    server.take(Mail("two", Watch()), 4.0)
    server.publish(4.0)
    server.tick(5.5)
    assert sent == [("two", ["one", "two"]), ("two", ["two"])], "the first watches no more"


def test_workers_are_told_what_waits_in_all_routers() -> None:
    told: list[Announced] = []

    def send(_to: str, message: AnyMessage) -> None:
        if isinstance(message, Announced):
            told.append(message)

    def waiting(now: float) -> float:
        server.take(Mail("tcp://p0", Announce(record())), now)
        server.publish(now)
        return told[-1].waiting

    server = DirectoryServer(Directory(3.0), send)
    assert waiting(0.0) == 0.0
    server.take(Mail("one", Watch(1, waiting={"p0": 1.5, "p1": 4.0})), 1.0)
    server.publish(1.0)
    server.take(Mail("two", Watch(1, waiting={"p0": 2.0})), 1.0)
    server.publish(1.0)
    assert waiting(1.5) == 3.5
    said = Settings({"m": ModelWeights(1, {"v1": 1.0}, {})})
    server.say(said, 2.0)
    assert (told[-1].settings, told[-1].waiting) == (said, 3.5), "also when it is told unasked"
    server.take(Mail("two", Watch(2)), 3.0)
    server.publish(3.0)
    assert waiting(3.5) == 1.5
    server.tick(7.0)
    assert waiting(7.5) == 0.0, "the first router has gone"


def test_group_layouts_are_compared_by_name_not_by_order() -> None:
    def named(name: str) -> GroupLayout:
        layout = group_layout()
        return GroupLayout(name, *[getattr(layout, f) for f in layout.__struct_fields__[1:]])

    directory = Directory(3.0)
    directory.announce(Announce(record("a", groups=(named("x"), named("y")))), 0.0)
    answer = directory.announce(Announce(record("b", groups=(named("y"), named("x")))), 0.0)
    assert isinstance(answer, Announced)
