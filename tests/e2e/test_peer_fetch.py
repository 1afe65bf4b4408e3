"""Real processes: a prefill worker fetches what another one has computed, and computes only the rest.

The test is the router in most of them: it names the source itself. Every answer equals transformers.generate.
"""

from __future__ import annotations

import itertools
import random
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from bench.fetch import ANSWER_TOKENS, ask_all, prompts
from tests.e2e.asking import ask, timeline
from tests.harness.local_stack import Stack, stack
from tests.harness.processes import Child
from tests.support.reference import draw_model
from wire.codec import pack_tokens
from wire.messages.base import Receipt, kind_of
from wire.messages.rooms import Ack, Decode, FetchSource, Prefill, Rejected, Reserved, Timeline, Tokens
from wire.request import GenerateRequest, SamplingParams

FAMILIES = ("qwen3", "gemma3_text", "qwen3_next", "deepseek_v3")
"""Of full attention, windows, states and latents."""
PAGE, PROMPT, OUTPUT = 16, 200, 12
ANSWER_S = 60.0


@dataclass
class Front:
    """What a router would do, for one request at a time."""

    stack: Stack
    rooms: Iterator[int] = field(default_factory=lambda: itertools.count(1))

    def run(self, prompt: list[int], worker: int, source: int | None = None) -> list[int]:
        """The answer of a prefill worker and the decode worker to a prompt of which `source` may have KV."""
        return self.answer(self.start(prompt, worker, source))

    def start(self, prompt: list[int], worker: int, source: int | None = None) -> int:
        """Start a room; its number."""
        prefill, (decode,) = self.stack.prefill, self.stack.decode
        room = next(self.rooms)
        request = GenerateRequest(
            request_id=f"r{room}",
            room=room,
            epoch=1,
            prompt=pack_tokens(prompt),
            sampling=SamplingParams(max_new_tokens=OUTPUT, temperature=0.0, ignore_eos=True),
        )
        named = None
        if source is not None:
            ready = prefill[source].ready
            named = FetchSource(ready["id"], ready["mailbox"], len(prompt) // PAGE)
        mailbox = self.stack.mailbox
        mailbox.send(decode.ready["mailbox"], Decode(request, prefill[worker].ready["mailbox"]))
        mailbox.send(prefill[worker].ready["mailbox"], Prefill(request, decode.ready["mailbox"], named))
        return room

    def answer(self, room: int) -> list[int]:
        """All tokens of a room."""
        tokens: list[int] = []
        mailbox, deadline = self.stack.mailbox, time.monotonic() + ANSWER_S
        while len(tokens) < OUTPUT:
            assert time.monotonic() < deadline, f"room {room} has {tokens} only"
            for mail in mailbox.wait(1.0):
                match mail.message:
                    case Rejected() as message if message.room == room:
                        raise AssertionError(message)
                    case Reserved() | Timeline() | Rejected() as message:
                        mailbox.send(mail.sender, Receipt(message.room, message.epoch, kind_of(message)))
                    case Tokens() as message:
                        for run in (run for run in message.runs if run.room == room):
                            tokens += run.tokens[len(tokens) - run.start :]
        for child in self.stack.workers:
            mailbox.send(child.ready["mailbox"], Ack([(room, 1, len(tokens))]))
        return tokens

    def metrics(self, child: Child) -> dict[str, Any]:
        """What the worker has counted."""
        return dict(self.stack.inspect(child, "metrics"))


def prompts_of(count: int) -> list[list[int]]:
    rng = random.Random(18)
    return [[rng.randrange(256) for _ in range(PROMPT)] for _ in range(count)]


@contextmanager
def served(
    family: str, directory: Path, backend: str, runner: tuple[str, ...] = (), **options: Any
) -> Iterator[tuple[Front, list[list[int]], list[list[int]]]]:
    """2P + 1D of a tiny model: what asks them, prompts, and the right answers."""
    prompts = prompts_of(2)
    model, answers = draw_model(family, directory / "models", 1, prompts, OUTPUT)
    with stack(
        model,
        directory / "run",
        2,
        1,
        runner=runner,
        dtype="float32",
        threads=1,
        page_size=PAGE,
        chunked_prefill_size=64,
        max_total_tokens=2048,
        max_running_requests=4,
        kv_transfer_backend=backend,
        peer_fetch_min_tokens=PAGE,
        **{"peer_fetch_min_s": 20.0, **options},
    ) as running:
        yield Front(running), prompts, answers


@pytest.mark.covering
@pytest.mark.parametrize("backend", ["tcp", "shm"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_second_worker_computes_only_what_the_first_did_not(
    family: str, backend: str, tmp_path: Path
) -> None:
    with served(family, tmp_path, backend) as (front, prompts, answers):
        first, second = front.stack.prefill
        for prompt, answer in zip(prompts, answers, strict=True):
            assert front.run(prompt, 0) == answer
            before = front.metrics(second)["prefill_tokens"]
            assert front.run(prompt, 1, source=0) == answer
            assert front.metrics(second)["prefill_tokens"] - before == PROMPT % PAGE
        counted = front.metrics(second)
        assert counted["fetches"] == {"done": 2}
        assert counted["fetched_tokens"] == 2 * (PROMPT - PROMPT % PAGE)
        assert front.metrics(first)["lent_bytes"] == counted["fetched_bytes"] > 0
        front.stack.settle()


@pytest.mark.parametrize("fault", [signal.SIGSTOP, signal.SIGKILL])
def test_a_holder_that_stops_or_dies_in_the_middle_of_its_write(
    fault: signal.Signals, tmp_path: Path
) -> None:
    """The requester computes the prompt in other pages. Those that the holder may still write to are free
    again when it goes on, or is gone."""
    flag = tmp_path / "flag"
    runner = ("tests.support.stops_in_write", str(flag))
    with served("qwen3", tmp_path, "shm", runner, peer_fetch_min_s=1.0) as (front, prompts, answers):
        first, second = front.stack.prefill
        assert front.run(prompts[0], 0) == answers[0]
        flag.touch()  # the holder's next write stops it
        room = front.start(prompts[0], 1, source=0)
        assert front.answer(room) == answers[0]
        outcome = front.metrics(second)["fetches"]
        assert outcome in ({"late": 1}, {"failed": 1})
        quarantined = front.stack.inspect(second, "memory")["quarantined_pages"]
        assert quarantined == PROMPT // PAGE
        if fault is signal.SIGKILL:
            first.kill()
            front.stack.prefill.remove(first)
        else:
            first.process.send_signal(signal.SIGCONT)
        front.stack.settle()
        assert front.run(prompts[1], -1) == answers[1]
        front.stack.settle()


DOCUMENTS, TIMES, SPREAD = 9, 5, 5.0


@pytest.mark.invariants
def test_a_stack_that_takes_turns_computes_less_with_fetches(tmp_path: Path) -> None:
    """The router names the sources. The pool of each worker holds a third of the documents."""
    asked = prompts(DOCUMENTS, TIMES, SPREAD)
    model, right = draw_model("qwen3", tmp_path / "models", 18, asked, ANSWER_TOKENS)
    fetched, apart = (
        ask_all(model, tmp_path / str(fetch), asked, DOCUMENTS // 3, fetch, peer_fetch_min_s=20.0)
        for fetch in (True, False)
    )
    assert fetched.answers == apart.answers == right
    assert apart.fetched == 0
    assert fetched.fetches["done"] > 0
    assert fetched.computed <= 0.75 * apart.computed


def test_the_trace_says_what_was_fetched(tmp_path: Path) -> None:
    (prompt,) = prompts_of(1)
    model, (answer,) = draw_model("qwen3", tmp_path / "models", 1, [prompt], OUTPUT)
    with stack(
        model,
        tmp_path / "run",
        2,
        1,
        router={"policy": "round-robin", "peer_fetch": True, "prefill_on_decode_tokens": 0},
        dtype="float32",
        threads=1,
        page_size=PAGE,
        max_total_tokens=2048,
        peer_fetch_min_tokens=PAGE,
        peer_fetch_min_s=20.0,
    ) as running:
        sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": OUTPUT}
        whole = PROMPT - PROMPT % PAGE
        for name, cached in (("one", {}), ("two", {"peer": whole})):
            said = ask(running, prompt, sampling, {"X-Request-Id": name})
            assert said["output_ids"] == answer
            about = timeline(running, name, 3)["about"]
            assert about["cached_from"].get(about["prefill"], {}) == cached
            assert about["cached_from"].get(about["decode"], {}) == ({"device": whole} if cached else {})
        running.settle()
