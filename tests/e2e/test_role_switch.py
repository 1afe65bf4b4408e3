"""Workers that change their roles under load, in real processes."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_failures import prompts
from tests.e2e.test_moves import ROUTER, Stream, read_stream
from tests.harness.local_stack import Stack, stack
from tests.harness.processes import Child
from tests.router.conftest import wait_until
from tests.support.reference import draw_model
from wire.mailbox import Mailbox
from wire.messages.directory import RoleSet, SetRole
from wire.records import Role

TOKENS = 120
PROMPTS = 4
TEXT = "a prompt that is asked before the roles change, and after that " * 3


def record_of(running: Stack, worker: Child) -> dict[str, Any]:
    """The worker's record, as the router has it; {} while it has none."""
    records = running.admin.get("/debug/workers").json()["workers"]
    return next((one for one in records if one["id"] == worker.ready["id"]), {})


def switch(running: Stack, worker: Child, role: Role) -> dict[str, Any]:
    """Let a worker change its role, and return its new record. An answer may be lost with the old mailbox."""
    before = record_of(running, worker)
    deadline = time.monotonic() + 60.0
    with Mailbox(key="") as directory:  # an address without a key is a directory's, where there is no secret
        while (after := record_of(running, worker)).get("role") != role:
            assert time.monotonic() < deadline, worker.log.read_text()
            directory.send(before["mailbox"], SetRole(role))
            answers = [one.message for one in directory.wait(0.25) if isinstance(one.message, RoleSet)]
            assert not any(one.problem for one in answers)
    assert after["incarnation"] > before["incarnation"]
    assert after["mailbox"] != before["mailbox"]
    assert after["pid"] == before["pid"] == worker.process.pid
    worker.ready["mailbox"] = after["mailbox"]
    old, new = running.prefill, running.decode
    if role is Role.PREFILL:
        old, new = new, old
    old.remove(worker)
    new.append(worker)
    return after


@contextmanager
def asked_all_the_time(running: Stack, asked: list[list[int]], tokens: int) -> Iterator[list[list[Stream]]]:
    """Each prompt again and again, until the block ends: the streams of each, which have all ended then."""
    over = threading.Event()
    streams: list[list[Stream]] = [[] for _ in asked]

    def ask_again(prompt: list[int], mine: list[Stream]) -> None:
        while not over.is_set():
            mine.append(Stream())
            read_stream(running, prompt, tokens, mine[-1])

    with ThreadPoolExecutor(len(asked)) as pool:
        readers = [pool.submit(ask_again, *one) for one in zip(asked, streams, strict=True)]
        try:
            yield streams
        finally:
            over.set()
        for reader in readers:
            reader.result(100.0)


def holders(running: Stack, text: str) -> set[str]:
    """The workers that the router believes to hold pages of the text."""
    route = running.admin.get("/debug/route", params={"prompt": text}).json()
    return {one["id"] for one in route["prefill"] + route["decode"] if one["held_tokens"]["device"]}


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3_next", marks=pytest.mark.invariants)])
def test_workers_that_change_their_roles_lose_no_stream_and_keep_weights_and_tree(
    tmp_path: Path, family: str
) -> None:
    asked = prompts(PROMPTS, seed=6)
    model, right = draw_model(family, tmp_path / "model", 1, asked, TOKENS)
    options = {"max_total_tokens": 4096, "page_size": 8, "overlap_depth": 1}
    with stack(model, tmp_path, 1, 2, ROUTER, switching=True, **options) as running:
        sampling = {"temperature": 0.0, "max_new_tokens": 2, "ignore_eos": True}
        text = {"text": TEXT, "sampling_params": sampling}
        told = running.http.post("/generate", json=text).json()
        first, second = running.prefill[0], running.decode[1]
        wait_until(lambda: first.ready["id"] in holders(running, TEXT), 10.0)
        before = holders(running, TEXT)
        (model / "model.safetensors").unlink()  # whoever loads the weights again fails
        with asked_all_the_time(running, asked, TOKENS) as streams:
            switch(running, second, Role.PREFILL)
            switch(running, first, Role.DECODE)
            switch(running, first, Role.PREFILL)
            wait_until(lambda: holders(running, TEXT) == before, 10.0)
        for mine, answer in zip(streams, right, strict=True):
            assert [stream.tokens for stream in mine] == [answer] * len(mine)
            assert all(stream.ended for stream in mine)
        again = running.http.post("/generate", json=text).json()
        assert again["output_ids"] == told["output_ids"]
        assert again["meta_info"]["cached_tokens"] > 0, "the tree of the worker that prefilled before"
        running.settle()
