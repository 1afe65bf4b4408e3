"""A worker whose cache is cleared: what is not in use goes from each tier, its events say so, and a repeat of
the command changes nothing."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from itertools import count, islice
from pathlib import Path
from typing import Any

import pytest

from decode_node.worker import DecodeWorker
from wire.codec import pack_tokens
from wire.mailbox import Mailbox
from wire.messages.any_message import AnyMessage
from wire.messages.caches import CacheCleared, ClearCache, Inspect, Inspected
from wire.messages.rooms import Decode, Tokens
from wire.request import GenerateRequest, SamplingParams
from worker.options import WorkerOptions

PAGE_SIZE = 4
SECONDS = 30.0


class Operator:
    """A worker with all tiers, and a mailbox that asks it."""

    def __init__(self, worker: DecodeWorker, mailbox: Mailbox) -> None:
        self._to = worker.record().mailbox
        self._mailbox = mailbox
        self._rooms = count(1)

    def ask(self, message: AnyMessage, kind: type[Any]) -> Any:
        self._mailbox.send(self._to, message)
        return self.next(kind)

    def next(self, kind: type[Any]) -> Any:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            for mail in self._mailbox.wait(1.0):
                if isinstance(mail.message, kind):
                    return mail.message
        raise AssertionError(f"no {kind.__name__} comes")

    def report(self, what: str) -> Any:
        return json.loads(self.ask(Inspect(what, 1), Inspected).body)

    def fill(self) -> None:
        """Prompts of 160 tokens, until nothing moves."""
        rng = random.Random(3)
        for room in islice(self._rooms, 8):
            prompt = [rng.randrange(256) for _ in range(160)]
            request = GenerateRequest(
                request_id=f"r{room}", room=room, epoch=1, prompt=pack_tokens(prompt),
                sampling=SamplingParams(max_new_tokens=1),
            )  # fmt: skip
            self.ask(Decode(request), Tokens)
        deadline = time.monotonic() + SECONDS
        while not self.report("tiers")["is_idle"]:
            assert time.monotonic() < deadline, "it never ends"
        assert self.media() == {"GPU", "CPU", "STORAGE"}

    def media(self) -> set[str]:
        return {medium for node in self.report("nodes") for medium in node["media"]}


@pytest.fixture
def operator(tmp_path: Path) -> Iterator[Operator]:
    options = WorkerOptions(
        model="m", engine="fake", page_size=PAGE_SIZE, max_total_tokens=512, max_running_requests=4,
        hicache_ratio=8.0, hicache_storage_backend="file", hicache_storage_path=tmp_path,
    )  # fmt: skip
    worker = DecodeWorker(options)
    with Mailbox() as mailbox:
        worker.start()
        made = Operator(worker, mailbox)
        made.fill()
        yield made
        made.report("memory")  # every pool balances
    worker.close()


def test_a_tier_is_cleared_and_the_others_stay(operator: Operator) -> None:
    held = operator.report("tiers")["host"]["full"]
    assert operator.media() == {"GPU", "CPU", "STORAGE"}
    freed = operator.ask(ClearCache(["device"], 7), CacheCleared).freed
    assert list(freed) == ["device"]
    assert 100 <= freed["device"] <= 128, "nothing runs"
    assert operator.media() == {"CPU", "STORAGE"}
    cleared = operator.ask(ClearCache(["storage"], 8), CacheCleared)
    assert cleared.problem == ""
    assert operator.media() == {"CPU"}
    assert operator.ask(ClearCache(["host"], 9), CacheCleared).freed == {"host": held["total"] - held["free"]}
    assert operator.report("nodes") == []
    after = operator.report("tiers")["host"]["full"]
    assert after["total"] == after["free"]


def test_a_repeat_is_answered_like_the_first(operator: Operator) -> None:
    command = ClearCache(["device", "host", "storage"], 7)
    first = operator.ask(command, CacheCleared)
    assert set(first.freed) == {"device", "host", "storage"}
    assert min(first.freed["device"], first.freed["host"]) > 100
    operator.fill()
    assert operator.ask(command, CacheCleared) == first
    assert operator.media() == {"GPU", "CPU", "STORAGE"}, "a repeat clears nothing"
