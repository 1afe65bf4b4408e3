"""Serving: prefill/decode apart against colocated, and against any OpenAI-compatible server.

    python -m bench.serve --json [--peer vllm [--peer-python PYTHON]] [--model DIR]
                                 [--url http://HOST:PORT --served-model NAME]

Token-id prompts of 256 tokens, 64 tokens out, end tokens ignored, at concurrency 1, 4 and 16. The systems
are driven alternately, a quarter of the requests at a time, so that a machine that slows down slows them all.
Every worker computes with as many threads as the machine has cores. `--peer vllm` starts vLLM's CPU build,
which PYTHON must have (else the exit code is 2), and a colocated worker with int8 weights.

`values`: {pd, colocated, int8, vllm, url: {c1, c4, c16: {tok_s, ttft_p50_ms, itl_p50_ms}}}.
`ratios`: `vllm_<c>` and `vllm_int8_<c>` tokens per second of colocated and of int8 / of vLLM; `vllm_ttft` our
time to first token / vLLM's, and `pd_ttft` apart / colocated, one request at a time.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from bench.common import argument_parser, print_result
from bench.make_model import make_model
from bench.vllm_server import PeerMissing, check_vllm, vllm_server
from tests.harness.local_stack import stack

PROMPT_TOKENS = 256
OUTPUT_TOKENS = 64
CONCURRENCIES = (1, 4, 16)
REQUESTS = 16
ROUNDS = 4
VOCABULARY = 32_000  # ids below this exist in every model this is pointed at


@dataclass
class ServerUnderTest:
    """One system under test, and its measurements at one concurrency."""

    url: str
    model: str
    busy_s: float = 0.0
    tokens: int = 0
    ttft_ms: list[float] = field(default_factory=list)
    itl_ms: list[float] = field(default_factory=list)

    def summary(self) -> dict[str, float]:
        """Medians, and tokens per second of the time in which this side was driven."""
        return {
            "tok_s": round(self.tokens / self.busy_s, 2),
            "ttft_p50_ms": round(statistics.median(self.ttft_ms), 1),
            "itl_p50_ms": round(statistics.median(self.itl_ms), 2),
        }


async def send(client: httpx.AsyncClient, side: ServerUnderTest, prompt: list[int]) -> None:
    """One request, added to the side's measurements. Raises RuntimeError if it is not answered in full."""
    body = {
        "model": side.model,
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    started = last = time.perf_counter()
    counted = 0
    async with client.stream("POST", f"{side.url}/v1/completions", json=body) as answer:
        if answer.status_code != 200:
            raise RuntimeError(f"{side.url} answered {answer.status_code}: {(await answer.aread()).decode()}")
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if event.get("usage"):
                counted = event["usage"]["completion_tokens"]
            if not event.get("choices"):
                continue
            now = time.perf_counter()
            (side.ttft_ms if last == started else side.itl_ms).append((now - last) * 1e3)
            last = now
    if counted != OUTPUT_TOKENS:
        raise RuntimeError(f"{side.url} gave {counted} tokens, not {OUTPUT_TOKENS}")
    side.tokens += counted


async def _drive(side: ServerUnderTest, prompts: list[list[int]], concurrency: int) -> None:
    waiting = iter(prompts)

    async def connection(client: httpx.AsyncClient) -> None:
        for prompt in waiting:
            await send(client, side, prompt)

    async with httpx.AsyncClient(timeout=600.0) as client:
        started = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(connection(client))
        side.busy_s += time.perf_counter() - started


def measure(urls: dict[str, tuple[str, str]], seed: int = 0) -> dict[str, dict[str, dict[str, float]]]:
    """{name: (url, model)} -> {name: {c1, ...: summary}}. One request of warm-up each."""
    rng = random.Random(seed)

    def prompts(count: int) -> list[list[int]]:
        return [[rng.randrange(1000, VOCABULARY) for _ in range(PROMPT_TOKENS)] for _ in range(count)]

    values: dict[str, dict[str, dict[str, float]]] = {name: {} for name in urls}
    for name, (url, model) in urls.items():
        asyncio.run(_drive(ServerUnderTest(url, model), prompts(1), 1))
        print(f"warm: {name}", flush=True)
    for concurrency in CONCURRENCIES:
        sides = {name: ServerUnderTest(url, model) for name, (url, model) in urls.items()}
        for number in range(ROUNDS):
            batch = prompts(max(concurrency, REQUESTS // ROUNDS))
            for name, side in sides.items():
                asyncio.run(_drive(side, batch, concurrency))
                print(f"c{concurrency} round {number + 1}/{ROUNDS}: {name} {side.summary()}", flush=True)
        for name, side in sides.items():
            values[name][f"c{concurrency}"] = side.summary()
    return values


def ratios_of(values: dict[str, dict[str, dict[str, float]]]) -> dict[str, float]:
    """The ratios that the docstring names, of the systems that were measured."""

    def compare(ours: str, theirs: str, concurrency: str, figure: str = "tok_s") -> float:
        return round(values[ours][concurrency][figure] / values[theirs][concurrency][figure], 3)

    ratios = {
        "colocated_c4_vs_c1": round(
            values["colocated"]["c4"]["tok_s"] / values["colocated"]["c1"]["tok_s"], 3
        ),
        "pd_vs_colocated_c4": compare("pd", "colocated", "c4"),
        "pd_ttft": compare("pd", "colocated", "c1", "ttft_p50_ms"),
    }
    if "vllm" in values:
        ratios["vllm_ttft"] = compare("colocated", "vllm", "c1", "ttft_p50_ms")
        for concurrency in CONCURRENCIES:
            ratios[f"vllm_c{concurrency}"] = compare("colocated", "vllm", f"c{concurrency}")
            ratios[f"vllm_int8_c{concurrency}"] = compare("int8", "vllm", f"c{concurrency}")
    return ratios


def main() -> int:
    """Start the systems, drive them alternately, print. Returns the exit code."""
    parser = argument_parser(__doc__)
    parser.add_argument("--peer", choices=["vllm"], help="a system to start and to compare with")
    parser.add_argument(
        "--peer-python", type=Path, default=Path(sys.executable), help="the Python that has the peer"
    )
    parser.add_argument("--url", help="a further system, OpenAI-compatible")
    parser.add_argument("--served-model", default="m", help="model name to ask it for")
    parser.add_argument("--model", type=Path, help="model directory; default: shape M, made anew")
    options = parser.parse_args()
    if options.peer:
        try:
            check_vllm(options.peer_python)
        except PeerMissing as error:
            sys.stderr.write(f"{error}\n")
            return 2
    with ExitStack() as cleanup:
        scratch = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="baton-bench-")))
        model: Path = options.model or scratch / "model"
        if options.model is None:
            make_model(model)
        threads = os.cpu_count() or 1
        common: dict[str, Any] = {"dtype": "bfloat16", "max_total_tokens": 8192, "threads": threads}
        pd = cleanup.enter_context(stack(model, scratch / "pd", 1, 1, **common))
        colocated = cleanup.enter_context(stack(model, scratch / "colocated", 0, 1, **common))
        urls = {"pd": (pd.url, "m"), "colocated": (colocated.url, "m")}
        if options.peer:
            int8 = stack(model, scratch / "int8", 0, 1, weight_dtype="int8", **common)
            urls["int8"] = (cleanup.enter_context(int8).url, "m")
            vllm = vllm_server(options.peer_python, model, scratch, threads)
            urls["vllm"] = (cleanup.enter_context(vllm), "m")
        if options.url:
            urls["url"] = (options.url.rstrip("/"), options.served_model)
        values = measure(urls)
    print_result("serve", ratios_of(values), values, options.json)
    return 0


if __name__ == "__main__":
    sys.exit(main())
