"""A client resumes a stream, gives up that connection unnoticed, and resumes it again on another one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx

from tests.router.api.test_resuming import NAMED, ask, openai_answer
from tests.router.conftest import RouterProcess, start_router, wait_until
from tests.support.fake_worker import FakeWorker
from tests.support.sse import sse_events
from wire.messages.any_message import AnyMessage
from wire.messages.rooms import Claim
from wire.records import Role
from wire.sockets import Mail

PATH = "/v1/completions"
BODY: dict[str, Any] = {"prompt": "Hello", "max_tokens": 40, "stream": True}


class _SlowToAnswer(FakeWorker):
    """Answers no claim before it has got two, as a worker in a long forward reads both after it."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.claims: dict[int, Mail] = {}
        super().__init__(*arguments, **options)

    def _take(self, mail: Mail) -> None:
        message: AnyMessage = mail.message
        if not isinstance(message, Claim):
            super()._take(mail)
        elif message.token not in self.claims:
            self.claims[message.token] = mail
            if len(self.claims) == 2:
                for claim in self.claims.values():
                    super()._take(claim)


def resume(router: RouterProcess, last_id: str) -> httpx.Response:
    headers = {**NAMED, "Last-Event-ID": last_id}
    return httpx.post(f"{router.url}{PATH}", json=BODY, headers=headers, timeout=30.0)


def test_the_later_of_two_connections_gets_the_stream(tmp_path: Path, model: Path) -> None:
    router = start_router(tmp_path, model)
    worker = _SlowToAnswer(Role.DECODE, router.mailbox, max_context=512)
    router.wait_for_workers(1)
    whole = ask(router, PATH, BODY)
    worker.wait_at = 10
    with router.http.stream("POST", PATH, json=BODY, headers=NAMED) as response:
        events = sse_events(response.iter_lines())
        first = [next(events) for _ in range(5)]
        last_id = first[-1].id
        assert last_id
        with ThreadPoolExecutor(2) as pool:
            earlier = pool.submit(resume, router, last_id)
            wait_until(lambda: len(worker.claims) == 1)
            later = pool.submit(ask, router, PATH, BODY, last_id)
            refused = earlier.result(30.0)
            worker.wait_at = None
            rest = later.result(30.0)
    assert (refused.status_code, refused.json()["error"]["code"]) == (503, "resume")
    assert openai_answer([*first, *rest]) == openai_answer(whole)
    assert not worker.aborted, "nothing was computed again"
    wait_until(lambda: router.admin.get("/debug/rooms").json()["rooms"] == [])
    worker.close()
    assert router.stop() == 0
