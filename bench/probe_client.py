"""ProbeClient: one account at the public API, and all that it can see of an answer."""

from __future__ import annotations

import http.client
import itertools
import json
import re
import statistics
import time
from typing import Any, Self
from urllib.parse import urlsplit

from bench.world_statistics import Observed

_TIMEOUT_S = 120.0
_IDLE_S = 2.0  # the server closes connections that were idle for longer
_DONE = b"[DONE]"
_NUMBER = re.compile(r"\d+(\.\d+)?")  # of a header; an id such as 5e1234 is none


class ProbeClient:
    """A context manager with one connection. Not for several threads."""

    def __init__(self, url: str, key: str, output_tokens: int) -> None:
        """Each prompt gets so many tokens."""
        at = urlsplit(url)
        assert at.hostname is not None, "the API has an address"
        self._http = http.client.HTTPConnection(at.hostname, at.port, timeout=_TIMEOUT_S)
        self._used_at = -_IDLE_S
        self._head = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
        self._output_tokens = output_tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def ask(self, prompt: list[int]) -> Observed:
        """Stream an answer. Raises RuntimeError for one that is not whole."""
        body = {
            "model": "m",
            "prompt": prompt,
            "max_tokens": self._output_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        data, came = json.dumps(body), list[float]()
        self._connect()
        started = time.perf_counter()
        self._http.request("POST", "/v1/completions", data, self._head)
        answer = self._http.getresponse()
        if answer.status != 200:
            raise RuntimeError(f"/v1/completions answered {answer.status}: {answer.read()!r}")
        last: dict[str, Any] = {}
        while (line := answer.readline()) and line.strip() != b"data: " + _DONE:
            if line.startswith(b"data:"):
                came.append(time.perf_counter())
                last = json.loads(line.partition(b":")[2])
        answer.read()
        if last.get("usage") is None:
            raise RuntimeError("an answer ended without its usage")
        return _observed(started, came, last, answer.getheaders())

    def probe(self, prompt: list[int]) -> Observed:
        """The same, with what /metrics of the public listener says before and after."""
        before = self._public_metrics()
        seen = self.ask(prompt)
        after = self._public_metrics()
        deltas = {
            f"metrics {name}": value - before.numbers.get(name, 0.0) for name, value in after.numbers.items()
        }
        return Observed({**seen.numbers, **deltas}, {**seen.categories, **after.categories})

    def _connect(self) -> None:
        """A new connection, if the last one may have been closed."""
        now = time.monotonic()
        if now - self._used_at >= _IDLE_S:
            self._http.close()
            self._http.connect()
        self._used_at = now

    def _public_metrics(self) -> Observed:
        """The samples of /metrics, where the public listener has it, and its status."""
        self._connect()
        self._http.request("GET", "/metrics", headers=self._head)
        answer = self._http.getresponse()
        body = answer.read()
        samples: dict[str, float] = {}
        for line in body.decode().splitlines() if answer.status == 200 else ():
            name, _, value = line.rpartition(" ")
            if name and not line.startswith("#"):
                samples[name] = float(value)
        return Observed(samples, {"status of public /metrics": str(answer.status)})


def _observed(
    started: float, came: list[float], last: dict[str, Any], headers: list[tuple[str, str]]
) -> Observed:
    """`came`: when each event came; the last has the usage and no token."""
    tokens = [at - started for at in came[:-1]]
    gaps = [later - earlier for earlier, later in itertools.pairwise(tokens)]
    usage = last["usage"]
    numbers = {
        "ttft_ms": tokens[0] * 1e3,
        "itl_mean_ms": statistics.fmean(gaps) * 1e3 if gaps else 0.0,
        "itl_max_ms": max(gaps, default=0.0) * 1e3,
        "total_ms": (came[-1] - started) * 1e3,
        "events": float(len(came)),
        "cached_tokens": float((usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0),
    }
    categories = {
        "usage": json.dumps({name: value for name, value in usage.items() if isinstance(value, int)}),
        "fingerprint": str(last.get("system_fingerprint")),
    }
    for name, value in headers:
        if _NUMBER.fullmatch(value):
            numbers[f"header {name.lower()}"] = float(value)
        else:
            categories[f"header {name.lower()}"] = value
    return Observed(numbers, categories)
