"""A client of the routers: reads one stream, and resumes it at another router when it breaks."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.chaos.asked import Answer, Asked, Choice

_PAUSE_S = 0.1
_DONE = "[DONE]"


@dataclass
class Streamed:
    """A stream as its client has seen it. Times are of the monotonic clock."""

    asked: Asked
    request_id: str
    answer: Answer = field(default_factory=dict)
    token_times: list[tuple[float, int]] = field(default_factory=list)  # of events with news, and the choice
    complete: bool = False
    contradicted: bool = False  # an event takes back tokens of an earlier one
    problem: str = ""  # why it is not complete
    resumed: int = 0
    last_id: str | None = None

    def gaps(self, after: float) -> list[float]:
        """Seconds between neighbouring events of one choice, the later of them after a time."""
        found = []
        for index in {choice for _, choice in self.token_times}:
            times = [at for at, choice in self.token_times if choice == index]
            found += [b - a for a, b in itertools.pairwise(times) if b > after]
        return found

    def first_after(self, at: float) -> float | None:
        """When the first event with new tokens came after a time."""
        return next((when for when, _ in self.token_times if when > at), None)


class Abandoned(Exception):
    """The client was told to leave."""


class Client:
    """Asks one request. `routers()` are the URLs to ask, the preferred one first."""

    def __init__(self, asked: Asked, request_id: str, salt: str, routers: Callable[[], list[str]]) -> None:
        self.streamed = Streamed(asked, request_id)
        self.leave = threading.Event()
        self._salt = salt
        self._routers = routers

    @property
    def decodes(self) -> bool:
        """Whether every choice has tokens: two, as the first is prefill's."""
        counts = Counter(choice for _, choice in self.streamed.token_times)
        wanted = self.streamed.asked.sampling.get("n", 1)
        return len(counts) == wanted and min(counts.values()) > 1

    def run(self, deadline: float, patience_s: float) -> Streamed:
        """Read to the end, or until `deadline`. A router that is silent for `patience_s` is left."""
        attempt = 0
        while time.monotonic() < deadline and not self.leave.is_set():
            urls = self._routers()
            url = urls[attempt % len(urls)]
            attempt += 1
            try:
                if self._attempt(url, patience_s):
                    return self.streamed
            except Abandoned:
                return self.streamed
            except httpx.HTTPError as error:
                self.streamed.problem = f"{type(error).__name__} at {url}: {error}"
            time.sleep(_PAUSE_S)
        self.streamed.problem = f"not complete in time; {self.streamed.problem}"
        return self.streamed

    def _attempt(self, url: str, patience_s: float) -> bool:
        """One connection. Whether the stream is over: complete, or failed for good."""
        streamed = self.streamed
        headers = {"x-request-id": streamed.request_id, "accept": "text/event-stream"}
        if streamed.last_id is not None:
            headers["last-event-id"] = streamed.last_id
            streamed.resumed += 1
        elif streamed.answer:
            streamed.problem = f"broken, and it has no id to resume from: {streamed.problem}"
            return True
        timeout = httpx.Timeout(patience_s, connect=2.0)
        with httpx.Client(base_url=url, timeout=timeout) as http:
            body = streamed.asked.body(self._salt)
            with http.stream("POST", streamed.asked.path, json=body, headers=headers) as response:
                if response.status_code != 200:
                    streamed.problem = f"{response.status_code}: {response.read().decode()[:200]}"
                    return response.status_code not in (429, 503)
                for line in response.iter_lines():
                    if self.leave.is_set():
                        raise Abandoned
                    if self._line(line):
                        return True
        streamed.problem = f"the stream of {url} ended early"
        return False

    def _line(self, line: str) -> bool:
        """Take a line of the event stream. Whether it was the last."""
        if line.startswith("id:"):
            self.streamed.last_id = line.removeprefix("id:").strip()
        if not line.startswith("data:"):
            return False
        data = line.removeprefix("data:").strip()
        if data == _DONE:
            self.streamed.complete = not self.streamed.problem.startswith("error event")
            return True
        event: dict[str, Any] = json.loads(data)
        if "error" in event:
            self.streamed.problem = f"error event: {event['error']}"
            return self.streamed.last_id is None
        if "choices" in event:
            for told in event["choices"]:
                self._take_delta(told)
        else:
            self._take_whole(event)
        return False

    def _take_delta(self, told: dict[str, Any]) -> None:
        choice = self._choice(told["index"])
        choice.text += told["text"]
        choice.finish = told["finish_reason"] or choice.finish
        if told.get("logprobs"):
            choice.named += told["logprobs"]["tokens"]
            choice.logprobs += told["logprobs"]["token_logprobs"]
        self.streamed.token_times.append((time.monotonic(), told["index"]))

    def _take_whole(self, told: dict[str, Any]) -> None:
        """An event of /generate repeats everything so far."""
        choice = self._choice(told["index"])
        before = len(choice.tokens)
        if told["output_ids"][:before] != choice.tokens:
            self.streamed.contradicted = True
        choice.tokens, choice.text = told["output_ids"], told["text"]
        finish = told["meta_info"]["finish_reason"]
        choice.finish = finish["type"] if finish else None
        if len(choice.tokens) > before:
            self.streamed.token_times.append((time.monotonic(), told["index"]))

    def _choice(self, index: int) -> Choice:
        return self.streamed.answer.setdefault(index, Choice())
