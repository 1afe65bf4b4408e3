"""Heartbeat: when a load that has moved is announced."""

from __future__ import annotations

import queue
import threading
import time

import msgspec

from tests.router.directory.test_directory import record
from wire.mailbox import Mailbox
from wire.messages.directory import Announce, Announced, Join, Joined, Withdraw
from wire.records import WorkerLoad, WorkerRecord
from wire.settings import NO_SETTINGS, ModelWeights, Settings
from worker.heartbeat import Heartbeat, has_moved


def test_what_moves_a_load() -> None:
    said = WorkerLoad(queued_prefill_tokens=1000, running_requests=16, headroom_tokens=5000, headroom_rows=9)
    assert not has_moved(said, said)
    assert not has_moved(said, msgspec.structs.replace(said, queued_prefill_tokens=1050, decode_step_s=0.0))
    assert has_moved(said, msgspec.structs.replace(said, queued_prefill_tokens=2000))
    assert has_moved(said, msgspec.structs.replace(said, queued_prefill_tokens=0))
    assert not has_moved(said, msgspec.structs.replace(said, running_requests=17))
    assert has_moved(said, msgspec.structs.replace(said, waiting_requests=4))
    assert has_moved(said, msgspec.structs.replace(said, headroom_tokens=0))
    assert has_moved(said, msgspec.structs.replace(said, headroom_rows=0))
    assert has_moved(said, msgspec.structs.replace(said, prefill_tokens_per_s=1.0))


def test_a_load_that_moved_is_announced_long_before_the_renewal() -> None:
    heard: queue.Queue[Announce | Withdraw] = queue.Queue()
    wanted = threading.Event()

    with Mailbox() as directory, Mailbox() as worker:
        load = WorkerLoad()

        def current() -> WorkerRecord:
            return record(load=load)

        heartbeat = Heartbeat(worker, lambda: directory.address, "p0", current, interval_s=600.0)
        thread = threading.Thread(target=_listen, args=(directory, heartbeat, heard, wanted), daemon=True)
        thread.start()
        heartbeat.start(timeout_s=10.0)
        first = heard.get(timeout=10)
        assert isinstance(first, Announce)
        for queued in (1000, 1010, 5000):
            load = WorkerLoad(queued_prefill_tokens=queued)
            heartbeat.on_load(load)
            if queued == 1010:  # no news: nothing is said of it but with the next
                continue
            told = heard.get(timeout=10)
            assert isinstance(told, Announce)
            assert told.record.load == load
        heartbeat.stop()
        heartbeat.stop()
        worker.send(directory.address, Withdraw("the last message", 1))
        left = [heard.get(timeout=10), heard.get(timeout=10)]
        assert left == [Withdraw("p0", 1), Withdraw("the last message", 1)], "it leaves once"
        wanted.set()
        thread.join(timeout=10)


def _listen(
    directory: Mailbox,
    heartbeat: Heartbeat,
    heard: queue.Queue[Announce | Withdraw],
    enough: threading.Event,
    lease_s: float = 6000.0,
) -> None:
    """The directory. Its answers go to the heartbeat at once; a worker's loop would pass them on."""
    while not enough.is_set():
        for mail in directory.wait(0.05):
            match mail.message:
                case Join() as message:
                    heartbeat.on_answer(Joined(message.worker, message.nonce, 1, lease_s))
                case Announce() as message:
                    heard.put(message)
                    heartbeat.on_answer(Announced(message.record.id, message.record.incarnation, lease_s))
                case Withdraw() as message:
                    heard.put(message)


def test_what_waits_in_routers_is_forgotten_without_a_directory() -> None:
    with Mailbox() as worker:
        heartbeat = Heartbeat(worker, lambda: "", "p0", record, interval_s=0.2)
        assert heartbeat.waiting_in_routers == 0.0
        heartbeat.on_answer(Announced("p0", 1, 3.0, waiting=2.5))
        assert heartbeat.waiting_in_routers == 2.5
        time.sleep(0.7)
        assert heartbeat.waiting_in_routers == 0.0


def test_settings_are_kept_for_a_directory_that_knows_less() -> None:
    with Mailbox() as directory, Mailbox() as worker:
        heartbeat = Heartbeat(worker, lambda: directory.address, "p0", record, interval_s=0.05)
        told = [Settings({"m": ModelWeights(2, {"v1": 1.0}, {})}), NO_SETTINGS]
        heard: list[Settings] = []

        def answer() -> None:
            while len(heard) < 3:
                for mail in directory.wait(0.05):
                    match mail.message:
                        case Join() as message:
                            heartbeat.on_answer(Joined(message.worker, message.nonce, 1, 3.0))
                        case Announce() as message:
                            said = told[min(len(heard), 1)]
                            heard.append(message.settings)
                            heartbeat.on_answer(Announced("p0", 1, 3.0, said))

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        heartbeat.start(timeout_s=10.0)
        thread.join(timeout=10.0)
        heartbeat.stop()
        assert heard[:3] == [NO_SETTINGS, told[0], told[0]]


def test_a_lease_that_is_shorter_than_the_interval_is_renewed_in_time() -> None:
    """Else every worker would be taken for lost where leases are short, or announcements rare."""
    heard: queue.Queue[Announce | Withdraw] = queue.Queue()
    enough = threading.Event()
    with Mailbox() as directory, Mailbox() as worker:
        heartbeat = Heartbeat(worker, lambda: directory.address, "p0", record, interval_s=600.0)
        arguments = (directory, heartbeat, heard, enough, 0.6)
        thread = threading.Thread(target=_listen, args=arguments, daemon=True)
        thread.start()
        heartbeat.start(timeout_s=10.0)
        for _ in range(4):
            assert isinstance(heard.get(timeout=10), Announce)
        enough.set()
        thread.join(timeout=10)
        heartbeat.stop()
