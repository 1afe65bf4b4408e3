"""Streams: clients that stream without pause, and resume at any ingress where a router was at fault."""

from __future__ import annotations

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import NamedTuple, Self

import httpx

from engine.fake import fake_generate
from tests.support.sse import DONE, sse_events

_TOKENS = 120
_GIVE_UP_S = 90.0  # after which a stream that does not go on is incomplete
_CONNECT_S = 5.0  # after which a host does not answer
_PAUSE_S = 0.3
_RETRIED = (404, 429, 500, 502, 503, 504)  # what Serve's proxy and a router answer while a router is missing


class Question(NamedTuple):
    """A prompt and the tokens that follow it."""

    prompt: list[int]
    answer: list[int]


def fake_question(rng: random.Random) -> Question:
    """A question to the fake engine."""
    prompt = [rng.randrange(256) for _ in range(rng.randrange(20, 120))]
    return Question(prompt, fake_generate(prompt, _TOKENS))


@dataclass
class Counts:
    """Over all streams so far."""

    streams: int = 0
    incomplete: int = 0  # not all of its tokens, or wrong ones, or broken where it should not be
    resumed: int = 0  # broken off by a router, and whole after that


class Streams:
    """`clients` threads, each with one stream after the other. Use it as a context manager."""

    def __init__(
        self,
        urls: Sequence[str],
        clients: int,
        draw: Callable[[random.Random], Question] = fake_question,
        give_up_s: float = _GIVE_UP_S,
    ) -> None:
        """Each client begins at one of the ingresses, and goes on at the next when a stream breaks off."""
        self.urls = urls  # may be replaced: streams that begin later go there
        self.counts = Counts()
        self.problems: list[str] = []
        self.routers_fail = False  # a stream may break off now
        self._clients = clients
        limits = httpx.Limits(max_connections=2 * clients)
        self._http = httpx.Client(timeout=httpx.Timeout(give_up_s, connect=_CONNECT_S), limits=limits)
        self._draw, self._give_up_s = draw, give_up_s
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._pool = ThreadPoolExecutor(clients)
        self._running: Sequence[Future[None]] = []

    def __enter__(self) -> Self:
        self._running = [self._pool.submit(self._client, number) for number in range(self._clients)]
        return self

    def __exit__(self, *_: object) -> None:
        """Let every client end its last stream."""
        self._stop.set()
        self._pool.shutdown()
        self._http.close()
        for one in self._running:
            one.result()

    def wait_for_more(self, streams: int, timeout_s: float) -> None:
        """Until so many more streams have ended."""
        wanted, deadline = self.counts.streams + streams, time.monotonic() + timeout_s
        while self.counts.streams < wanted:
            assert time.monotonic() < deadline, f"the streams stand still: {self.counts}"
            time.sleep(0.1)

    def _client(self, number: int) -> None:
        rng = random.Random(number)
        while not self._stop.is_set():
            breaks, problem = self._whole(self._draw(rng), number)
            with self._lock:
                self.counts.streams += 1
                self.counts.resumed += bool(breaks) and not problem
                if problem:
                    self.counts.incomplete += 1
                    self.problems.append(problem)

    def _whole(self, question: Question, ingress: int) -> tuple[int, str]:
        """One stream to its end. Returns how often it broke off, and what is wrong with it."""
        sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": len(question.answer)}
        body = {"input_ids": question.prompt, "sampling_params": sampling, "stream": True}
        progress = _Progress()
        deadline, breaks = time.monotonic() + self._give_up_s, 0
        while not self._part(self._url(ingress + breaks), body, progress):
            breaks += 1
            if progress.is_refused or not self.routers_fail:
                return breaks, f"broke off for good: {progress.why}"
            if time.monotonic() > deadline:
                return breaks, f"does not go on: {progress.why}"
            time.sleep(_PAUSE_S)
        right = progress.output == question.answer
        return breaks, "" if right else f"wrong tokens after {breaks} breaks: {progress.output}"

    def _url(self, number: int) -> str:
        urls = self.urls
        return urls[number % len(urls)]

    def _part(self, url: str, body: dict[str, object], progress: _Progress) -> bool:
        """Stream from there until [DONE], or until it breaks off: False."""
        headers = {"Accept": "text/event-stream"}
        if progress.last_id:
            headers["Last-Event-ID"] = progress.last_id
        try:
            with self._http.stream("POST", f"{url}/generate", json=body, headers=headers) as answer:
                if answer.status_code != 200:
                    progress.why = f"{answer.status_code}: {answer.read().decode()[:200]}"
                    progress.is_refused = answer.status_code not in _RETRIED
                    return False
                for event in sse_events(answer.iter_lines()):
                    if event.data == DONE:
                        return True
                    if event.kind == "error":
                        progress.why = event.data
                        return False
                    progress.last_id = event.id
                    progress.output = json.loads(event.data)["output_ids"]
        except httpx.TransportError as error:
            progress.why = repr(error)
        else:
            progress.why = "the stream ended without [DONE]"
        return False


@dataclass
class _Progress:
    """What a client has of a stream."""

    last_id: str = ""
    output: list[int] = ()  # type: ignore[assignment]
    why: str = ""  # it broke off last
    is_refused: bool = False  # for good
