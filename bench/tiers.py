"""What the host and the storage tier save: the last turn of conversations that the device's pool cannot all
hold.

    python -m bench.tiers --json [--tokens 8192] [--conversations 3] [--model DIR]

Shape M in bfloat16, one colocated worker, whose pool holds one conversation. Each conversation has a first
turn of all but 512 tokens, and two more of 256 new tokens each; the last one is measured. `ratios`:

    ttft_host_gain       time to first token with the device alone / with a host tier; medians
    ttft_storage_gain    the same / after a restart, from files past the page cache (direct I/O)
    host_vs_memcpy       bytes/s of loads from the host / of memcpy, pages of shape M in random order
    small_host_vs_memcpy  the same with pages of 32 KiB, in runs of 8 pages, as those of a turn lie
    ship_from_host_vs_device  bytes/s of pages sent to another process from the host / from the device's pool
    decode_slowdown_while_moving   a decode step while backups run at 1 GB/s / while nothing moves

`values`: time to first token (s) and prompt tokens computed in the last turn, by tier. The three systems run
one after another, since two would share the cores; all else is measured alternately.
"""

from __future__ import annotations

import ctypes
import json
import os
import random
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx
import numpy as np
import torch

from bench.common import alternate, argument_parser, medians, print_result, seconds
from bench.host_shipping import host_against_device
from bench.make_model import make_model, shape_m
from kvcache.allocator import Pages
from kvcache.layout import KVGroupSpec
from kvcache.pool import MHAKVCache
from kvcache.tiers.copier import HostCopier
from kvcache.tiers.host_pool import HostPool
from tests.harness.local_stack import Stack, stack

PAGE_SIZE = 16
OUTPUT_TOKENS = 16
TURN_TOKENS = 256
VOCABULARY = 32_000
_PACE = 1e9
_MOVED_BYTES = 512 << 20
_ROUNDS = 9


class Turn(NamedTuple):
    """The last turn of a conversation."""

    ttft_s: float
    computed: int


# -- copies ------------------------------------------------------------------------------------------


def _pages(kv_heads: int, head_dim: int, layers: int, nbytes: int) -> tuple[MHAKVCache, HostPool, int]:
    spec = KVGroupSpec(tuple(range(layers)), kv_heads, head_dim, torch.bfloat16)
    count = nbytes // spec.page_bytes(PAGE_SIZE)
    return MHAKVCache(spec, count, PAGE_SIZE), HostPool([spec], PAGE_SIZE, {"full": count}), count


def _shuffled(rng: np.random.Generator, count: int, run: int) -> dict[str, Pages]:
    """All pages of the full group, in runs in random order."""
    runs = np.arange(1, count // run * run + 1, dtype=np.int32).reshape(-1, run)
    return {"full": rng.permutation(runs).reshape(-1)}


def _against_memcpy(kv_heads: int, head_dim: int, layers: int, run: int) -> float:
    """Bytes/s of loads from host pages to device pages, both in runs in random order, over memcpy's."""
    pool, host, count = _pages(kv_heads, head_dim, layers, _MOVED_BYTES)
    copier = HostCopier({"full": pool}, host)
    rng = np.random.default_rng(0)
    device, pages = _shuffled(rng, count, run), _shuffled(rng, count, run)
    source, target, nbytes = host.arenas["full"].bytes, pool.bytes, len(pages["full"]) * pool.page_bytes
    source.fill_(1)
    sides = {
        "copier": lambda: seconds(lambda: copier.to_device(device, pages)),
        "memcpy": lambda: seconds(lambda: ctypes.memmove(target.data_ptr(), source.data_ptr(), nbytes)),
    }
    alternate(sides, 1)
    measured = medians(alternate(sides, _ROUNDS))
    return measured["memcpy"] / measured["copier"]


# -- decode beside backups ---------------------------------------------------------------------------


class _Backups:
    """Copies to the host at a pace, on a thread, while `running`."""

    def __init__(self) -> None:
        config = shape_m()
        pool, host, count = _pages(
            config.num_key_value_heads, config.head_dim, config.num_hidden_layers, 1 << 28
        )
        self._copier = HostCopier({"full": pool}, host, _PACE)
        self._ids = {"full": np.arange(1, count + 1, dtype=np.int32)}
        self._running, self._ends = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.is_set():
            if self._running.wait(0.1):
                self._copier.to_host(self._ids, self._ids)

    @contextmanager
    def at_work(self) -> Iterator[None]:
        """While it copies."""
        self._running.set()
        yield
        self._running.clear()

    def close(self) -> None:
        """End the thread."""
        self._ends.set()
        self._thread.join()


def _decode_slowdown(running: Stack) -> float:
    """Seconds of an answer's tokens after the first one, beside backups / alone."""
    backups, draw = _Backups(), random.Random(3)

    def answer() -> float:
        return _ask(running, [draw.randrange(1000, VOCABULARY) for _ in range(64)], 48)[1]

    def beside() -> float:
        with backups.at_work():
            return answer()

    sides: dict[str, Callable[[], float]] = {"alone": answer, "beside": beside}
    alternate(sides, 1)
    measured = medians(alternate(sides, _ROUNDS))
    backups.close()
    return measured["beside"] / measured["alone"]


# -- conversations -----------------------------------------------------------------------------------


def _ask(running: Stack, prompt: list[int], tokens: int = OUTPUT_TOKENS) -> tuple[float, float, list[int]]:
    """Seconds to the first token and from there to the last one, and the tokens."""
    params = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": tokens}
    body = {"input_ids": prompt, "sampling_params": params, "stream": True}
    started = time.perf_counter()
    first, said = 0.0, []
    with httpx.stream("POST", f"{running.url}/generate", json=body, timeout=600.0) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - started
                said = json.loads(line[6:])["output_ids"]
    return first, time.perf_counter() - started - first, said


def _computed(running: Stack) -> int:
    return int(running.inspect(running.decode[0], "metrics")["prefill_tokens"])


def _wait_for_tiers(running: Stack) -> None:
    deadline = time.monotonic() + 60.0
    while not running.inspect(running.decode[0], "tiers").get("is_idle", True):
        if time.monotonic() > deadline:
            raise TimeoutError("the worker's tiers never come to rest")


def _turn(running: Stack, text: list[int], draw: random.Random) -> Turn:
    """Ask with `text`, which then grows by the answer and the next turn's tokens."""
    before = _computed(running)
    ttft_s, _, said = _ask(running, text)
    _wait_for_tiers(running)
    turn = Turn(ttft_s, _computed(running) - before)
    text += said
    text += [draw.randrange(1000, VOCABULARY) for _ in range(TURN_TOKENS - len(said))]
    return turn


def _last_turns(running: Stack, texts: list[list[int]], draw: random.Random, turns: int) -> list[Turn]:
    """The last of so many turns of all conversations, which take turns."""
    for _ in range(turns - 1):
        for text in texts:
            _turn(running, text, draw)
    return [_turn(running, text, draw) for text in texts]


def _serving(model: Path, directory: Path, tokens: int, **options: Any) -> Any:
    directory.mkdir()
    return stack(
        model, directory, 0, 1, dtype="bfloat16", threads=os.cpu_count() or 1, page_size=PAGE_SIZE,
        max_total_tokens=tokens + 512, max_context_tokens=tokens + 256, max_running_requests=4, **options,
    )  # fmt: skip


def _measure(model: Path, scratch: Path, tokens: int, count: int) -> tuple[dict[str, list[Turn]], float]:
    """The last turns by tier, and what backups cost decode."""
    draw = random.Random(1)
    found: dict[str, list[Turn]] = {}
    texts = [
        [draw.randrange(1000, VOCABULARY) for _ in range(tokens - 2 * TURN_TOKENS)] for _ in range(count)
    ]
    storage = {
        "hicache_ratio": float(count + 1),
        "hicache_storage_backend": "file",
        "hicache_storage_path": str(scratch / "kv"),
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_storage_direct_io": True,
    }
    with _serving(model, scratch / "device", tokens) as running:
        found["device"] = _last_turns(running, [list(text) for text in texts], draw, 2)
        slowdown = _decode_slowdown(running)
    with _serving(model, scratch / "host", tokens, **storage) as running:
        found["host"] = _last_turns(running, texts, draw, 2)
    with _serving(model, scratch / "storage", tokens, **storage) as running:
        found["storage"] = _last_turns(running, texts, draw, 1)
    return found, slowdown


def main() -> None:
    """Measure, print."""
    parser = argument_parser(__doc__)
    parser.add_argument("--tokens", type=int, default=8192, help="of a conversation's last prompt")
    parser.add_argument("--conversations", type=int, default=3)
    parser.add_argument("--model", type=Path, help="default: shape M, made anew")
    given = parser.parse_args()
    config = shape_m()
    with ExitStack() as cleanup:
        scratch = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="bt-", dir="/tmp")))
        model = given.model or scratch / "model"
        if given.model is None:
            make_model(model)
        ratios = {
            "host_vs_memcpy": _against_memcpy(
                config.num_key_value_heads, config.head_dim, config.num_hidden_layers, run=1
            ),
            "small_host_vs_memcpy": _against_memcpy(2, 64, 4, run=8),  # 16 tokens: 32 KiB
            "ship_from_host_vs_device": host_against_device(_ROUNDS),
        }
        found, ratios["decode_slowdown_while_moving"] = _measure(
            model, scratch, given.tokens, given.conversations
        )
        ttft = {tier: median(turn.ttft_s for turn in turns) for tier, turns in found.items()}
        for tier in ("host", "storage"):
            ratios[f"ttft_{tier}_gain"] = ttft["device"] / ttft[tier]
        values = {
            tier: {"ttft_s": round(ttft[tier], 3), "computed": [turn.computed for turn in turns]}
            for tier, turns in found.items()
        }
        print_result("tiers", {name: round(ratio, 3) for name, ratio in ratios.items()}, values, given.json)


if __name__ == "__main__":
    main()
