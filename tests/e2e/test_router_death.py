"""A router is killed in mid-answer: its clients go on at another one.

Real processes, a tiny model in float32.
"""

from __future__ import annotations

import base64
import contextlib
import re
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.e2e.test_failures import leave, take
from tests.harness.local_stack import Stack, stack
from tests.harness.processes import Child
from tests.support.sse import DONE, SseEvent, sse_events

KEY = "a key that is shared"
TOKENS = 600  # more than any worker computes before it notices
ENOUGH = 6  # events that every client has when the router dies
GREEDY = {"temperature": 0, "ignore_eos": True, "max_tokens": TOKENS}
SAMPLED = {"temperature": 0.8, "top_p": 0.95, "ignore_eos": True, "max_tokens": TOKENS}
USAGE = {"stream_options": {"include_usage": True}}


def prompt(number: int) -> list[int]:
    return [(number * 37 + position * 11) % 250 for position in range(30 + 9 * number)]


REQUESTS: dict[str, dict[str, Any]] = {
    "greedy": {"prompt": prompt(1), **GREEDY, **USAGE},
    "greedy, short prompt": {"prompt": prompt(0)[:3], **GREEDY},
    "seeded": {"prompt": prompt(2), **SAMPLED, "seed": 5},
    "no seed": {"prompt": prompt(3), **SAMPLED},
    "two choices": {"prompt": prompt(4), **SAMPLED, "n": 2, "seed": 6, **USAGE},
    "log-probabilities": {"prompt": prompt(5), **GREEDY, "logprobs": 3},
    "stop string": {"prompt": prompt(6), **GREEDY, "stop": ["never to be found", "\0\0\0"]},
    "penalties": {"prompt": prompt(7), **SAMPLED, "seed": 7, "presence_penalty": 1.0, "logprobs": 1},
}


@dataclass
class Scene:
    """Two routers of one directory, one prefill and two decode workers. `stack` has the router that lives."""

    stack: Stack
    doomed: Child

    def stream(self, url: str, body: dict[str, Any], last_id: str, took: Callable[[SseEvent], None]) -> None:
        headers = {"Accept": "text/event-stream", **({"Last-Event-ID": last_id} if last_id else {})}
        with (
            httpx.Client(base_url=url, timeout=120.0) as client,
            client.stream(
                "POST", "/v1/completions", json={**body, "stream": True}, headers=headers
            ) as answer,
        ):
            assert answer.status_code == 200, answer.read()
            for event in sse_events(answer.iter_lines()):
                took(event)

    def whole(self, body: dict[str, Any], last_id: str = "") -> list[SseEvent]:
        """A stream of the router that lives, to its end."""
        events: list[SseEvent] = []
        self.stream(self.stack.url, body, last_id, events.append)
        assert events[-1].data == DONE
        return events

    def resumes(self, rooms: str) -> int:
        metrics = self.stack.admin.get("/metrics").text
        found = re.search(rf'^baton_router_resumes_total{{rooms="{rooms}"}} (\S+)', metrics, re.MULTILINE)
        return int(float(found[1])) if found else 0

    def loads(self, name: str) -> list[int]:
        return [self.stack.inspect(worker, "load").get(name, 0) for worker in self.stack.decode]


@contextlib.contextmanager
def scene(model: Path, directory: Path, grace_s: float) -> Iterator[Scene]:
    with stack(
        model, directory, prefill=1, decode=2, dtype="float32", threads=1, max_total_tokens=16384,
        resume_grace_s=grace_s, router={"resume_key": KEY, "prefill_on_decode_tokens": 8},
    ) as running:  # fmt: skip
        options = {
            "model": str(model), "served_model_name": "m", "port": 0, "admin_ports": "0",
            "directory": running.directory.ready["mailbox"],
            "resume_key": KEY, "prefill_on_decode_tokens": 8,
        }  # fmt: skip
        with doomed_router(options, directory) as doomed:
            yield Scene(running, doomed)


@contextlib.contextmanager
def doomed_router(options: dict[str, Any], directory: Path) -> Iterator[Child]:
    with Child("router", options, directory) as child:
        child.wait_ready()
        with httpx.Client(base_url=child.ready["admin"], timeout=10.0) as client:
            wait_until(lambda: len(client.get("/debug/workers").json()["workers"]) == 3)
        yield child


def wait_until(condition: Callable[[], bool], timeout_s: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def answer(events: list[SseEvent]) -> dict[str, Any]:
    """What a client has made of the events."""
    choices: dict[int, dict[str, Any]] = {}
    usage = None
    for event in events:
        if event.data == DONE:
            continue
        usage = event.json.get("usage") or usage
        for choice in event.json["choices"]:
            known = choices.setdefault(
                choice["index"], {"text": "", "finish": None, "tokens": [], "logprobs": []}
            )
            assert known["finish"] is None
            known["text"] += choice["text"]
            known["finish"] = choice["finish_reason"]
            told = choice["logprobs"] or {"tokens": [], "token_logprobs": [], "text_offset": []}
            known["tokens"] += zip(told["tokens"], told["text_offset"], strict=True)
            known["logprobs"] += told["token_logprobs"]
    if usage is not None:
        del usage["prompt_tokens_details"]  # what was cached for those who computed last
    return {"choices": choices, "usage": usage}


def break_streams(
    scene: Scene, requests: Mapping[str, dict[str, Any]], first: Callable[[], object] = lambda: None
) -> dict[str, list[SseEvent]]:
    """What each client has when the router was killed in the middle of all answers, after `first`."""
    had: dict[str, list[SseEvent]] = {name: [] for name in requests}
    far = {name: threading.Event() for name in requests}

    def read(name: str) -> None:
        def took(event: SseEvent) -> None:
            had[name].append(event)
            if len(had[name]) >= ENOUGH:
                far[name].set()

        with contextlib.suppress(httpx.TransportError):
            scene.stream(scene.doomed.ready["http"], requests[name], "", took)

    with ThreadPoolExecutor(len(requests)) as pool:
        reading = [pool.submit(read, name) for name in requests]
        for name, event in far.items():
            assert event.wait(60.0), f"{name}: no events"
        first()
        scene.doomed.kill()
        for one in reading:
            one.result(60.0)
    for name, events in had.items():
        assert events[-1].data != DONE, f"{name} was over before the router died"
    return had


def seed_of(event_id: str) -> int:
    """The seed that the router has drawn: see router/streams/resume.py."""
    seed: int
    (_, _, seed) = struct.unpack_from(">IQQ", base64.urlsafe_b64decode(event_id.partition(":")[0]))
    return seed


def resume_all(scene: Scene, had: dict[str, list[SseEvent]]) -> dict[str, list[SseEvent]]:
    with ThreadPoolExecutor(len(had)) as pool:
        rest = {name: pool.submit(scene.whole, REQUESTS[name], events[-1].id) for name, events in had.items()}
        return {name: one.result(120.0) for name, one in rest.items()}


def all_right(scene: Scene, had: dict[str, list[SseEvent]], rest: dict[str, list[SseEvent]]) -> None:
    bodies = [{**REQUESTS[name], "seed": seed_of(events[0].id)} for name, events in had.items()]
    with ThreadPoolExecutor(len(bodies)) as pool:
        wanted = [answer(events) for events in pool.map(scene.whole, bodies)]
    for (name, events), want in zip(had.items(), wanted, strict=True):
        got = answer(events + rest[name])
        for index, choice in want["choices"].items():  # sums of floats differ with the batch
            logprobs = got["choices"][index].pop("logprobs")
            assert logprobs == pytest.approx(choice.pop("logprobs"), abs=1e-3), name
        assert got == want, name


def test_another_router_goes_on_with_every_stream(tiny_model: Path, tmp_path: Path) -> None:
    with scene(tiny_model, tmp_path, grace_s=120.0) as running:
        had = break_streams(running, REQUESTS)
        wait_until(lambda: sum(running.loads("running_requests")) == 0)
        held = [len(running.stack.inspect(worker, "rooms")) for worker in running.stack.decode]
        assert sum(held) == len(REQUESTS) + 1, "paused, not dropped"
        rest = resume_all(running, had)
        assert running.resumes("claimed") == len(REQUESTS)
        all_right(running, had, rest)
        running.stack.settle()


@pytest.mark.invariants
def test_after_the_grace_the_rooms_are_gone_and_are_computed_again(tiny_model: Path, tmp_path: Path) -> None:
    with scene(tiny_model, tmp_path, grace_s=2.0) as running:
        had = break_streams(running, REQUESTS)
        running.stack.settle()
        rest = resume_all(running, had)
        assert running.resumes("computed again") == len(REQUESTS)
        all_right(running, had, rest)
        running.stack.settle()


@pytest.mark.invariants
def test_rooms_that_are_moving_go_on(tiny_model: Path, tmp_path: Path) -> None:
    """One of two decode workers leaves, and its rooms are on their way when the router dies."""
    with scene(tiny_model, tmp_path, grace_s=15.0) as running:
        gone = take(running.stack.decode, running.stack.decode[0])

        def begin_moves() -> None:
            leave(gone)
            with httpx.Client(base_url=running.doomed.ready["admin"], timeout=10.0) as client:
                begun = re.compile(r'moves_total\{state="begun"\} [1-9]')
                wait_until(lambda: begun.search(client.get("/metrics").text) is not None)

        had = break_streams(running, REQUESTS, begin_moves)
        rest = resume_all(running, had)
        assert gone.process.wait(60) == 0
        gone.end()
        assert sum(running.resumes(rooms) for rooms in ("claimed", "computed again")) == len(REQUESTS)
        all_right(running, had, rest)
        running.stack.settle()
