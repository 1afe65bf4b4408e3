"""A request that was accepted waits for workers: with comments if it is streamed, and it ends complete."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass, field

from tests.router.conftest import RouterProcess, wait_until
from tests.support.fake_worker import FakeWorker, expected_tokens
from wire.codec import pack_tokens
from wire.messages.rooms import Decode, Prefill
from wire.records import Role


@dataclass
class Streamed:
    """One streamed /generate, read by a thread of its own."""

    lines: list[str] = field(default_factory=list)
    status: int = 0
    done: threading.Event = field(default_factory=threading.Event)

    @property
    def comments(self) -> int:
        return sum(line.startswith(":") for line in self.lines)

    @property
    def tokens(self) -> list[int]:
        """Of the last event, which has all of them."""
        events = [line[6:] for line in self.lines if line.startswith("data: ") and line != "data: [DONE]"]
        tokens: list[int] = json.loads(events[-1])["output_ids"] if events else []
        return tokens


def stream(router: RouterProcess, prompt: list[int], count: int) -> Streamed:
    """Ask in the background."""
    streamed = Streamed()
    body = {"input_ids": prompt, "stream": True, "sampling_params": {"max_new_tokens": count}}

    def read() -> None:
        with router.http.stream("POST", "/generate", json=body, timeout=60) as response:
            streamed.status = response.status_code
            for line in response.iter_lines():
                streamed.lines.append(line)
        streamed.done.set()

    threading.Thread(target=read, daemon=True).start()
    return streamed


def ends_right(streamed: Streamed, prompt: list[int], count: int) -> None:
    assert streamed.done.wait(30.0)
    assert streamed.status == 200
    assert streamed.tokens == expected_tokens(pack_tokens(prompt), count)
    assert [line for line in streamed.lines if line][-1] == "data: [DONE]"


def test_a_stream_without_any_worker_is_sent_comments_until_one_comes(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    streamed = stream(router, [1, 2], 5)
    wait_until(lambda: streamed.comments >= 2, 30.0)
    assert streamed.status == 200, "the head is out before the first token"
    (room,) = router.admin.get("/debug/rooms").json()["rooms"]
    assert (room["tokens"], room["workers"]) == (0, [])
    workers.append(FakeWorker(Role.DECODE, router.mailbox))
    ends_right(streamed, [1, 2], 5)


def test_both_workers_of_a_stream_are_killed_and_replaced(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    """Twice: in its prefill, and in mid-stream. It waits for the replacement and ends complete."""

    def pair() -> tuple[FakeWorker, FakeWorker]:
        prefill = FakeWorker(Role.PREFILL, router.mailbox, prefill_s=0.1)
        decode = FakeWorker(Role.DECODE, router.mailbox, step_s=0.02)
        workers.extend((prefill, decode))
        return prefill, decode

    def replace(old: tuple[FakeWorker, FakeWorker]) -> tuple[FakeWorker, FakeWorker]:
        for worker in old:
            workers.remove(worker)
            worker.die()
        router.wait_for_workers(0, 30.0)
        return pair()

    both = pair()
    router.wait_for_workers(2)
    streamed = stream(router, [1], 60)
    wait_until(lambda: both[0].count(Prefill) == 1 and both[1].count(Decode) == 1)
    both = replace(both)
    wait_until(lambda: len(streamed.tokens) > 10)
    replace(both)
    ends_right(streamed, [1], 60)


def test_an_answer_that_is_not_streamed_waits_without_a_word(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    body = {"input_ids": [3], "sampling_params": {"max_new_tokens": 4}}
    answers: list[list[int]] = []

    def ask() -> None:
        response = router.http.post("/generate", json=body, timeout=60)
        answers.append(response.json()["output_ids"])

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    wait_until(lambda: len(router.admin.get("/debug/rooms").json()["rooms"]) == 1)
    asking.join(3.0)
    assert not answers
    workers.append(FakeWorker(Role.DECODE, router.mailbox))
    asking.join(30.0)
    assert answers == [expected_tokens(pack_tokens([3]), 4)]


def test_an_openai_client_does_not_see_the_comments(router: RouterProcess, workers: list[FakeWorker]) -> None:
    texts: list[str] = []

    def ask() -> None:
        chunks = router.openai().completions.create(model="tiny", prompt="a", max_tokens=4, stream=True)
        texts.extend(chunk.choices[0].text for chunk in chunks if chunk.choices)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    other = stream(router, [1, 2], 5)
    wait_until(lambda: other.comments >= 2, 30.0)  # so the client has had one, too, or will in an instant
    workers.append(FakeWorker(Role.DECODE, router.mailbox))
    asking.join(30.0)
    assert len(texts) >= 1
    ends_right(other, [1, 2], 5)


def test_twenty_restarts_of_one_long_stream_are_fine(
    router: RouterProcess, workers: list[FakeWorker]
) -> None:
    """Each worker dies or leaves after it has sent a few tokens; another is there before."""
    workers.append(FakeWorker(Role.DECODE, router.mailbox, step_s=0.02))
    streamed = stream(router, [5], 2000)
    for number in range(20):
        old = workers[-1]
        # Twice where the router saw that the last one drains before its rooms came back: a move was begun.
        wait_until(lambda old=old: old.count(Decode) >= 1, 30.0)
        new = FakeWorker(Role.DECODE, router.mailbox, step_s=0.02 if number < 19 else 0.001)
        workers.append(new)
        wait_until(lambda new=new: new.record.id in {one["id"] for one in router.workers()}, 30.0)
        had = len(streamed.lines)
        wait_until(lambda had=had: len(streamed.lines) > had + 6, 30.0)
        if number % 2:
            workers.remove(old)
            old.die()
        else:
            old.drain()
    ends_right(streamed, [5], 2000)
    metrics = router.admin.get("/metrics").text
    assert "baton_router_restarts_total 20.0" in metrics
