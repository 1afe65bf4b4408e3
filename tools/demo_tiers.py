"""`make demo-tiers`: a conversation goes on after all workers were restarted, with its KV read from files.

Serves the demo model twice with one storage directory, by one prefill and one decode worker in plain
processes. Ends with one line, from the workers' own counters:

    demo-tiers ok: 96 of 121 prompt tokens from storage, 25 computed
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.harness.local_stack import Stack, stack

ROOT = Path(__file__).resolve().parents[1]
FIRST = "How do I use os.path.join? Please show me an example with three parts, and say what it returns."
SECOND = "And how do I get the last part back?"
_STORED_S = 30.0


@contextmanager
def _serving(directory: Path, storage: Path) -> Iterator[Stack]:
    directory.mkdir()
    with stack(
        ROOT / "deploy/demo_model",
        directory,
        hicache_ratio=4.0,
        hicache_storage_backend="file",
        hicache_storage_path=str(storage),
        hicache_storage_prefetch_policy="wait_complete",
        hicache_storage_prefetch_threshold=16,
        hicache_storage_prefetch_if_slower=True,
        max_total_tokens=4096,
    ) as running:
        yield running


def _ask(running: Stack, messages: list[dict[str, str]]) -> dict[str, Any]:
    body = {"model": "m", "messages": messages, "temperature": 0.0, "max_tokens": 64}
    answer = running.http.post("/v1/chat/completions", json=body)
    answer.raise_for_status()
    return dict(answer.json())


def _wait_until_stored(running: Stack) -> None:
    deadline = time.monotonic() + _STORED_S
    while not all(running.inspect(worker, "tiers")["is_idle"] for worker in running.workers):
        if time.monotonic() > deadline:
            raise TimeoutError("the workers are still writing to storage")


def main() -> int:
    """Returns the exit code: 0 if the second turn's prompt came from storage, else 1."""
    with tempfile.TemporaryDirectory(prefix="baton-tiers-") as folder:
        scratch = Path(folder)
        messages = [{"role": "user", "content": FIRST}]
        with _serving(scratch / "first", scratch / "kv") as running:
            said = _ask(running, messages)["choices"][0]["message"]["content"]
            _wait_until_stored(running)
            print(f"turn 1: {said}", flush=True)
        messages += [{"role": "assistant", "content": said}, {"role": "user", "content": SECOND}]
        print("all workers are restarted", flush=True)
        with _serving(scratch / "second", scratch / "kv") as running:
            answer = _ask(running, messages)
            prompt = answer["usage"]["prompt_tokens"]
            computed = sum(running.inspect(one, "metrics")["prefill_tokens"] for one in running.workers)
            print(f"turn 2: {answer['choices'][0]['message']['content']}", flush=True)
    stored = max(prompt - computed, 0)
    state = "ok" if stored else "failed"
    print(f"demo-tiers {state}: {stored} of {prompt} prompt tokens from storage, {computed} computed")
    return 0 if stored else 1


if __name__ == "__main__":
    sys.exit(main())
