"""Hostile HTTP in batches, with an honest question after each."""

from __future__ import annotations

import asyncio

import httpx
from hypothesis import HealthCheck, Phase, given, settings

from tests.fuzz.documented import send_documented
from tests.fuzz.exchange import exchange_all
from tests.fuzz.findings import say
from tests.fuzz.raw_http import hostile_requests
from tests.fuzz.target import Target

_BATCH = 500
_TO_API = 400  # of a batch; the others go to the admin listener
_DOCUMENTED = 0.2  # share of the requests that schemathesis draws at random; borders come on top
_POST_PATHS = 5


def send_http(target: Target, count: int, borders: bool) -> None:
    """At least `count` requests, to the API and to the admin listener. With `borders`, those of each field of
    the document, too (about 1,500)."""
    findings, url = target.findings, target.running.url
    wanted = findings.http + count
    send_documented(url, max(1, int(count * _DOCUMENTED) // _POST_PATHS), borders, findings)
    target.check("the documented requests")
    say(f"http: {findings.http} from the document")
    requests = drawn_requests(wanted - findings.http, genuine_event_id(url))
    for start in range(0, len(requests), _BATCH):
        batch = requests[start : start + _BATCH]
        asyncio.run(exchange_all(url, batch[:_TO_API], findings))
        asyncio.run(exchange_all(str(target.running.admin.base_url), batch[_TO_API:], findings))
        target.check(f"{findings.http} requests")
    say(f"http: {findings.http} in all, {findings.unexpected_5xx} unexpected 5xx, {findings.hangs} hangs")


def drawn_requests(count: int, genuine: str) -> list[bytes]:
    """So many hostile requests, drawn by hypothesis; the same in every run, but for `genuine`."""
    drawn: list[bytes] = []

    @settings(
        max_examples=count, database=None, derandomize=True, deadline=None, phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )  # fmt: skip
    @given(hostile_requests(genuine))
    def draw(sent: bytes) -> None:
        drawn.append(sent)

    draw()
    return drawn


def genuine_event_id(url: str) -> str:
    """The event id of a stream that this router has served."""
    body, headers = {"prompt": "Hi", "max_tokens": 2, "stream": True}, {"Accept": "text/event-stream"}
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=headers, timeout=30.0) as answer:
        return next(line[4:] for line in answer.iter_lines() if line.startswith("id: "))
