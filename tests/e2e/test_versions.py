"""Two models, and two versions of one name, behind one router: real processes, exact against transformers."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness.processes import Child
from tests.support.reference import draw_model, reference_greedy
from tests.support.tiny_models import make_tiny

WORKER: dict[str, Any] = {
    "dtype": "float32", "page_size": 16, "max_total_tokens": 8192, "threads": 1, "chunked_prefill_size": 48,
}  # fmt: skip
SHORT, LONG = 24, 200


@dataclass
class Fleet:
    """A router, and the workers of several models or versions."""

    http: httpx.Client
    admin: httpx.Client
    directory: str
    folder: Path
    cleanup: ExitStack
    workers: list[Child] = field(default_factory=list)

    def add(self, model: Path, name: str, *modules: str, **options: Any) -> list[Child]:
        """Start workers, and wait until the router sees them."""
        given = {
            "model": str(model),
            "served_model_name": name,
            "directory": self.directory,
            **WORKER,
            **options,
        }
        added = [self.cleanup.enter_context(Child(module, given, self.folder)) for module in modules]
        self.workers += added
        for child in added:
            child.wait_ready()
        self.wait_for(len(self.workers))
        return added

    def leave(self, *workers: Child) -> None:
        """These drain and end."""
        for child in workers:
            child.ask_to_end()
        for child in workers:
            child.process.wait(60)
            self.workers.remove(child)
        self.wait_for(len(self.workers))

    def wait_for(self, count: int) -> None:
        deadline = time.monotonic() + 30
        while len(self.admin.get("/debug/workers").json()["workers"]) != count:
            assert time.monotonic() < deadline, f"the router does not see {count} workers"
            time.sleep(0.02)

    def generate(self, model: str, prompt: list[int], count: int = SHORT) -> list[int]:
        sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": count}
        body = {"model": model, "input_ids": prompt, "sampling_params": sampling, "stream": True}
        tokens: list[int] = []
        with self.http.stream("POST", "/generate", json=body) as answer:
            assert answer.status_code == 200, answer.read()
            for line in answer.iter_lines():
                if line.startswith("data: {"):
                    said = json.loads(line[6:])
                    assert "error" not in said, said
                    tokens = said["output_ids"]
        return tokens

    def busy(self) -> int:
        return len(self.admin.get("/debug/rooms").json()["rooms"])


@contextmanager
def fleet(folder: Path, **models: Path) -> Iterator[Fleet]:
    with ExitStack() as cleanup:
        served = [{"model": str(path), "served_model_name": name} for name, path in models.items()]
        options = {"models": served, "port": 0, "admin_ports": "0", "prefill_on_decode_tokens": 0}
        router = cleanup.enter_context(Child("router", options, folder))
        ready = router.wait_ready()
        http, admin = (
            cleanup.enter_context(httpx.Client(base_url=ready[name], timeout=120.0))
            for name in ("http", "admin")
        )
        yield Fleet(http, admin, ready["mailbox"], folder, cleanup)


def prompts(seed: int, count: int = 4) -> list[list[int]]:
    draw = random.Random(seed)
    return [[draw.randrange(256) for _ in range(draw.choice((17, 40, 90)))] for _ in range(count)]


@pytest.mark.slow
def test_two_models_behind_one_router_are_each_exact(tmp_path: Path) -> None:
    asked = prompts(1)
    a, answers_a = draw_model("llama", tmp_path / "a", 1, asked, SHORT)
    b, answers_b = draw_model("qwen3", tmp_path / "b", 2, asked, SHORT)
    with fleet(tmp_path / "run", a=a, b=b) as running, ThreadPoolExecutor(8) as pool:
        running.add(a, "a", "prefill_node", "decode_node")
        running.add(b, "b", "prefill_node", "decode_node", page_size=8)
        for _ in range(2):  # the second time with cached prefixes
            got = [pool.submit(running.generate, name, prompt) for name in "ab" for prompt in asked]
            assert [one.result() for one in got] == answers_a + answers_b


@pytest.mark.slow
def test_streams_that_run_through_an_update_are_exact_against_the_version_on_which_they_began(
    tmp_path: Path,
) -> None:
    asked = prompts(3, count=6)
    old, new = (make_tiny("llama", tmp_path / str(seed), seed) for seed in (3, 90))
    with fleet(tmp_path / "run", m=old) as running, ThreadPoolExecutor(8) as pool:
        first = running.add(old, "m", "prefill_node", "decode_node", "decode_node")
        running.add(new, "m", "prefill_node", "decode_node")
        began = [pool.submit(running.generate, "m", prompt, LONG) for prompt in asked]
        while running.busy() < len(asked):
            time.sleep(0.01)
        assert not any(one.done() for one in began), "they run through the change"
        running.leave(first[1])  # its streams go on, on the other decode worker of their version
        answers = [one.result() for one in began]
        assert [len(one) for one in answers] == [LONG] * len(asked)
        on_old = [is_exact(old, prompt, answer) for prompt, answer in zip(asked, answers, strict=True)]
        on_new = [is_exact(new, prompt, answer) for prompt, answer in zip(asked, answers, strict=True)]
        assert [not one for one in on_old] == on_new, (
            "each is of one version from its first token to its last"
        )
        assert any(on_old)
        assert any(on_new)
        running.leave(first[0], first[2])
        after = [running.generate("m", prompt) for prompt in asked]
        assert all(is_exact(new, prompt, answer) for prompt, answer in zip(asked, after, strict=True))


def is_exact(model: Path, prompt: list[int], answer: list[int]) -> bool:
    """Whether each token is what transformers finds likeliest after all before it."""
    likeliest = reference_greedy(model, [*prompt, *answer])
    return all(token in likeliest[len(prompt) - 1 + place] for place, token in enumerate(answer))
