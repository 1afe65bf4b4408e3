"""A worker's KV events: a router that asks too late gets a snapshot, from an idle engine loop too."""

from __future__ import annotations

import json
import random
import time

import pytest

from decode_node.worker import DecodeWorker
from prefill_node.worker import PrefillWorker
from tests.support.kv_events_reader import Page, Pages, Replay, pages_of
from wire.codec import pack_tokens
from wire.mailbox import Mailbox
from wire.messages.caches import Inspect, Inspected
from wire.messages.rooms import Decode, Prefill, Tokens
from wire.request import GenerateRequest, SamplingParams
from worker.loop import Worker
from worker.options import KVEventsOptions, WorkerOptions

PAGE_SIZE = 4
SECONDS = 20.0


class Router:
    """The part of a router that this test needs."""

    def __init__(self, worker: Worker, mailbox: Mailbox) -> None:
        self._to = worker.record().mailbox
        self._mailbox = mailbox
        self._split = isinstance(worker, PrefillWorker)

    def generate(self, room: int, prompt: list[int]) -> None:
        """Ask, and wait for the first token."""
        request = GenerateRequest(
            request_id=f"r{room}", room=room, epoch=1, prompt=pack_tokens(prompt),
            sampling=SamplingParams(max_new_tokens=1),
        )  # fmt: skip
        self._mailbox.send(
            self._to, Prefill(request, "tcp://127.0.0.1:9") if self._split else Decode(request)
        )
        self._until(lambda message: isinstance(message, Tokens) and message.runs[0].room == room)

    def nodes(self) -> list[dict[str, object]]:
        self._mailbox.send(self._to, Inspect("nodes", 1))
        return list(json.loads(self._until(lambda message: isinstance(message, Inspected)).body))

    def _until(self, wanted: object) -> Inspected:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            for mail in self._mailbox.wait(1.0):
                if wanted(mail.message):  # type: ignore[operator]
                    return mail.message  # type: ignore[return-value]
        raise AssertionError("the worker does not answer")


def tell(replay: Replay) -> dict[int, Page]:
    """The pages that a new router learns of by a replay."""
    pages, batches = Pages("m"), replay.ask(0)
    assert min(batches) > 4, "the buffer reaches back so far"
    pages.apply(batches, first=min(batches))
    return pages.held


@pytest.mark.parametrize("kind", [PrefillWorker, DecodeWorker])
@pytest.mark.parametrize("groups", [(), ("window", "state")], ids=["full", "hybrid"])
def test_an_idle_worker_tells_a_late_router_what_its_tree_holds(
    kind: type[Worker], groups: tuple[str, ...]
) -> None:
    options = WorkerOptions(
        model="m", engine="fake", fake_groups=groups, page_size=PAGE_SIZE, max_total_tokens=512,
        kv_events_config=KVEventsOptions(buffer_batches=4), max_running_requests=4,
    )  # fmt: skip
    rng = random.Random(3)
    worker = kind(options)
    with Mailbox() as mailbox:
        worker.start()
        router = Router(worker, mailbox)
        shared = [rng.randrange(400) for _ in range(40)]
        for room in range(1, 20):
            router.generate(room, [*shared[: 4 * room], *(rng.randrange(400) for _ in range(30))])
        with Replay(worker.record().replay) as replay:
            deadline = time.monotonic() + SECONDS
            while (told := tell(replay)) != (holds := pages_of(router.nodes(), "m", PAGE_SIZE)):
                assert time.monotonic() < deadline, "they never agree"
            assert len(told) == len(holds) > 20
    worker.close()
