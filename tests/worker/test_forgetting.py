"""A worker that forgets tenants: what they cached is not found from then on, and goes from each tier, and
what others have stays."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from decode_node.worker import DecodeWorker
from kvcache.storage.keys import visibility
from tests.kvcache.support import memory
from wire.checksums import ChecksumMode
from wire.codec import pack_tokens
from wire.mailbox import Mailbox
from wire.messages.any_message import AnyMessage
from wire.messages.caches import ForgetTenant, Inspect, Inspected, TenantForgotten
from wire.messages.rooms import Decode, Tokens
from wire.messages.transfer import Fetch
from wire.page_hash import tenant_key
from wire.request import GenerateRequest, SamplingParams
from wire.settings import TenantGeneration
from worker.forgetting import TenantForgetting
from worker.options import WorkerOptions
from worker.rooms import Rooms

PAGE, PROMPT = 4, 64
SECONDS = 30.0
FIRST = TenantGeneration(10, [0])


class TenantsWorker:
    """A worker with all tiers, and a mailbox that asks it."""

    def __init__(self, directory: Path, mailbox: Mailbox, **options: Any) -> None:
        usual: dict[str, Any] = {
            "model": "m", "engine": "fake", "page_size": PAGE, "max_total_tokens": 1024,
            "max_running_requests": 4, "hicache_ratio": 4.0, "hicache_storage_backend": "file",
            "hicache_storage_path": directory, "hicache_storage_prefetch_threshold": 1,
            "hicache_storage_prefetch_if_slower": True, "hicache_storage_prefetch_policy": "wait_complete",
        }  # fmt: skip
        self.worker = DecodeWorker(WorkerOptions(**usual | options))
        self._directory = directory
        self._mailbox = mailbox
        self._rooms = count(time.monotonic_ns())
        self._tokens = count(1)

    def __enter__(self) -> TenantsWorker:
        self.worker.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.report("memory")  # every pool balances
        self.worker.close()

    def send(self, message: AnyMessage) -> None:
        self._mailbox.send(self.worker.record().mailbox, message)

    def next(self, kind: type[Any]) -> Any:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            for mail in self._mailbox.wait(1.0):
                if isinstance(mail.message, kind):
                    return mail.message
        raise AssertionError(f"no {kind.__name__} comes")

    def report(self, what: str) -> Any:
        self.send(Inspect(what, 1))
        return json.loads(self.next(Inspected).body)

    def begin(self, tenant: str, seed: int, generation: int = 0, new_tokens: int = 1) -> None:
        prompt = [(seed * 31 + position) % 250 for position in range(PROMPT)]
        request = GenerateRequest(
            request_id="r", room=next(self._rooms), epoch=1, prompt=pack_tokens(prompt), tenant=tenant,
            tenant_generation=generation, sampling=SamplingParams(max_new_tokens=new_tokens),
        )  # fmt: skip
        self.send(Decode(request))

    def ask(self, tenant: str, seed: int, generation: int = 0) -> int:
        """How many tokens of a prompt were cached."""
        self.begin(tenant, seed, generation)
        (run,) = self.next(Tokens).runs
        return int(run.cached_tokens)

    def rest(self) -> None:
        """Until nothing moves."""
        deadline = time.monotonic() + SECONDS
        while not self.report("tiers")["is_idle"]:
            assert time.monotonic() < deadline, "it never ends"

    def forget(self, tenant: str, generation: TenantGeneration) -> TenantForgotten:
        self.send(ForgetTenant(tenant, generation, next(self._tokens)))
        answer = self.next(TenantForgotten)
        assert isinstance(answer, TenantForgotten)
        return answer

    def nodes(self, tenant: str) -> int:
        """Of a tenant's key string, on device and host."""
        owned = (tenant_key(node["tenant"], node["generation"]) for node in self.report("nodes"))
        return sum(owner == tenant for owner in owned)

    def files(self, tenant: str) -> int:
        """Of a tenant's key string."""
        return len(list(self._directory.glob(f"??/{visibility(tenant).decode()}*")))


@pytest.fixture
def worker(tmp_path: Path) -> Iterator[TenantsWorker]:
    with Mailbox() as mailbox, TenantsWorker(tmp_path, mailbox) as made:
        yield made


def fill(worker: TenantsWorker) -> None:
    for tenant in ("a", "b"):
        for seed in (1, 2):
            assert worker.ask(tenant, seed) == 0
    worker.rest()
    assert (worker.nodes("a"), worker.files("a"), worker.files("b")) == (2, 32, 32)


def wait_until_gone(worker: TenantsWorker, tenant: str) -> None:
    deadline = time.monotonic() + SECONDS
    while worker.nodes(tenant) or worker.files(tenant):
        assert time.monotonic() < deadline, "something stays"


def test_a_tenant_is_forgotten_on_all_tiers_and_others_are_not(worker: TenantsWorker) -> None:
    fill(worker)
    told = worker.forget("a", FIRST)
    assert (told.nodes, told.locked_pages, told.unfinished, told.problem) == (2, 0, [], "")
    assert {tier: removal.pages for tier, removal in told.removed.items()} == {
        "device": 32, "host": 32, "storage": 32,
    }  # fmt: skip
    assert told.removed["device"].bytes == told.removed["host"].bytes > 0
    assert (worker.nodes("a"), worker.files("a")) == (0, 0)
    assert worker.ask("a", 1, FIRST.revision) == 0
    assert worker.ask("a", 1, FIRST.revision) > 0, "the new generation caches as well"
    assert worker.ask("b", 1) > 0
    worker.rest()
    assert worker.files("b") == 32


def test_a_request_of_an_older_generation_runs_in_the_new_one(worker: TenantsWorker) -> None:
    fill(worker)
    worker.forget("a", FIRST)
    assert worker.ask("a", 1) == 0, "from a router that has not heard of it"
    assert worker.ask("a", 1, FIRST.revision) > 0
    worker.rest()
    assert worker.nodes("a") == 0 < worker.nodes(tenant_key("a", FIRST.revision))


def test_nothing_of_an_older_generation_is_lent() -> None:
    def asked(tenant: str) -> Fetch:
        return Fetch(1, "w", "h", "", "", [], b"", "", "", tenant, b"", 0, {}, ChecksumMode.NONE)

    rooms: Rooms[Any] = Rooms(1.0, 1.0)
    forgetting = TenantForgetting(memory(PAGE, 16), rooms, lambda *_: None)
    forgetting.learn({"a": FIRST})
    assert forgetting.current_fetch(asked("a")).tenant == tenant_key("a", FIRST.revision)
    for tenant in ("", "b", tenant_key("a", FIRST.revision), tenant_key("a", FIRST.revision + 1)):
        assert forgetting.current_fetch(asked(tenant)) == asked(tenant)


def test_a_stream_ends_in_its_generation_and_what_it_leaves_goes(tmp_path: Path) -> None:
    with Mailbox() as mailbox, TenantsWorker(tmp_path, mailbox, fake_step_s=0.01) as worker:
        fill(worker)
        worker.begin("a", 1, new_tokens=200)
        worker.next(Tokens)
        told = worker.forget("a", FIRST)
        assert told.locked_pages > 0
        assert told.unfinished == ["device", "storage"]
        produced, is_over = 0, False
        while not is_over:
            (run,) = worker.next(Tokens).runs
            produced, is_over = run.start + len(run.tokens), run.finish is not None
        assert produced == 200
        wait_until_gone(worker, "a")
        assert worker.ask("a", 1, FIRST.revision) == 0
        assert worker.ask("b", 2) > 0


def test_a_repeat_is_answered_like_the_first(worker: TenantsWorker) -> None:
    fill(worker)
    command = ForgetTenant("a", FIRST, 7)
    worker.send(command)
    first = worker.next(TenantForgotten)
    worker.send(command)
    assert worker.next(TenantForgotten) == first
    again = worker.forget("a", TenantGeneration(11, [0, 10]))
    assert (again.nodes, again.removed["storage"].pages) == (0, 0)


def test_what_was_forgotten_is_not_found_after_a_restart(tmp_path: Path) -> None:
    with Mailbox() as mailbox:
        with TenantsWorker(tmp_path, mailbox) as worker:
            fill(worker)
        with TenantsWorker(tmp_path, mailbox) as worker:
            assert worker.ask("b", 1) > 0, "storage outlives a worker"
            assert worker.ask("a", 1, FIRST.revision) == 0, "before the worker has heard of it"
            told = worker.forget("a", FIRST)  # what was not done before is done now
            assert told.removed["storage"].pages == 32
            assert (worker.files("a"), worker.files("b")) == (0, 32)


def test_a_storage_that_removes_nothing_by_prefix_says_so(
    worker: TenantsWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    fill(worker)
    tiers = worker.worker.parts.services.memory.tiers
    assert tiers is not None
    assert tiers.storage is not None
    monkeypatch.setattr(tiers.storage.backend, "clear", lambda prefix: None)
    told = worker.forget("a", FIRST)
    assert "cannot remove by prefix" in told.problem
    assert worker.ask("a", 1, FIRST.revision) == 0


def test_public_pages_stay(tmp_path: Path) -> None:
    sharing = {"sharing_min_tenants": 2, "sharing_epoch_s": 0.3}
    with Mailbox() as mailbox, TenantsWorker(tmp_path, mailbox, **sharing) as worker:
        for tenant in ("a", "b", "c"):
            worker.ask(tenant, 1)
        deadline = time.monotonic() + SECONDS
        while not worker.report("sharing")["public_pages"]:
            assert time.monotonic() < deadline, "nothing becomes public"
        worker.rest()
        public = worker.files("")
        worker.forget("a", FIRST)
        wait_until_gone(worker, "a")
        assert worker.files("") >= public > 0
        assert worker.ask("a", 1, FIRST.revision) > 0
