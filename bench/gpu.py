"""How close decode on a GPU comes to its memory: `python -m bench.gpu --json [--shape 0.6b|8b]`.

A colocated worker as it is served: bfloat16, recorded decode steps, overlap depth 1, KV capacity measured,
random weights, context 512.

decode floor    (all weight bytes once + KV bytes of the batch) / best read or copy rate of the GPU over 1 GiB

`ratios`: decode_b1, decode_b8, decode_b64     floor time / our time of a step
          t1_vs_greedy_b64                     time of a step greedy / with temperature 1, top-k and top-p
`values`: read_gb_s, step_ms_b1, step_ms_b8, step_ms_b64, step_ms_b64_t1, kv_tokens

All are medians of measurements taken in turn. Without a GPU it says why, and `ratios` and `values` are empty.
"""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import PretrainedConfig, Qwen3Config

from bench.common import alternate, argument_parser, medians, print_result, seconds
from bench.floor import CONTEXT, decode_bytes
from bench.make_model import make_model, shape_m
from bench.scheduler import DecodeHere
from common.errors import ConfigError
from common.options import parse_options
from scheduler.config import Phase
from scheduler.req import Req, RequestLimits
from wire.request import GenerateRequest, OutputDelta, SamplingParams
from worker.build import build_engine, build_scheduler
from worker.device import choose_device
from worker.options import WorkerOptions

BATCHES = (1, 8, 64)
STEPS = 64
ROUNDS = 7
MOST_OUTPUTS = 2 * STEPS
COPY_BYTES = 1 << 30  # many times a cache


def shape_8b() -> Qwen3Config:
    """Qwen3-8B's configuration."""
    return Qwen3Config(
        vocab_size=151_936,
        hidden_size=4096,
        intermediate_size=12_288,
        num_hidden_layers=36,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=151_645,
        dtype=torch.bfloat16,
    )


SHAPES: dict[str, Callable[[], PretrainedConfig]] = {"0.6b": shape_m, "8b": shape_8b}


class ReadRate:
    """Bytes per second that a device moves at best."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._source = torch.ones(COPY_BYTES // 4, device=device)
        self._target = torch.empty_like(self._source)

    def __call__(self) -> float:
        """One measurement: the better of a sum, which reads, and a copy, which reads and writes."""
        read = COPY_BYTES / min(self._seconds(self._source.sum) for _ in range(3))
        copied = (
            2 * COPY_BYTES / min(self._seconds(partial(self._target.copy_, self._source)) for _ in range(3))
        )
        return max(read, copied)

    def _seconds(self, work: Callable[[], object]) -> float:
        def done() -> None:
            work()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)

        return seconds(done)


class Worker(DecodeHere):
    """A colocated worker in this process, stepped here."""

    def __init__(self, directory: Path, device: torch.device) -> None:
        options = parse_options(
            WorkerOptions,
            {
                "model": str(directory),
                "device": str(device),
                "dtype": "bfloat16",
                "overlap_depth": 1,
                "gpu_memory_utilization": 0.8,  # ReadRate needs memory, too
                "max_running_requests": max(BATCHES),
                "chunked_prefill_size": 4096,
                "prefix_cache": "none",
                "max_context_tokens": CONTEXT + 2 * MOST_OUTPUTS,
            },
        )
        self._engine, self.memory = build_engine(options, reserves=False)
        self._scheduler = build_scheduler(options, self.memory, self._engine, self, frozenset(Phase))
        vocab = self._engine.spec.vocab_size
        self._limits = RequestLimits(CONTEXT + 2 * MOST_OUTPUTS, vocab, ())
        self._random = np.random.default_rng(0)
        self._rooms = 0
        self._tokens: dict[int, int] = {}

    def on_tokens(self, req: Req, start: int, delta: OutputDelta) -> None:
        """Count them."""
        self._tokens[req.room] = start + len(delta.tokens)

    def step_seconds(self, batch: int, **sampling: Any) -> float:
        """Seconds of a decode step of `batch` requests, over STEPS of them at about CONTEXT tokens."""
        self._tokens.clear()
        for _ in range(batch):
            self._add(SamplingParams(max_new_tokens=MOST_OUTPUTS, ignore_eos=True, **sampling))
        while len(self._tokens) < batch or min(self._tokens.values()) < 4:
            self._scheduler.step()
        before, started = sum(self._tokens.values()), time.perf_counter()
        for _ in range(STEPS):
            self._scheduler.step()
        took, tokens = time.perf_counter() - started, sum(self._tokens.values()) - before
        while not self._scheduler.idle:
            self._scheduler.step()
        return took * batch / tokens

    def close(self) -> None:
        """End the engine."""
        self._engine.close()
        self.memory.close()

    def _add(self, sampling: SamplingParams) -> None:
        self._rooms += 1
        prompt = self._random.integers(300, self._limits.vocab_size, CONTEXT - STEPS // 2).astype("<i4")
        request = GenerateRequest(
            request_id=f"bench-{self._rooms}",
            room=self._rooms,
            epoch=0,
            prompt=prompt.tobytes(),
            sampling=sampling,
        )
        self._scheduler.add(Req.from_request(request, "bench", self._limits))


def main() -> None:
    """Command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="0.6b")
    parser.add_argument("--model", type=Path, help="the shape's directory; written there if it is missing")
    parser.add_argument("--device", default="cuda", help="cuda or cuda:N; cpu tries the bench itself out")
    options = parser.parse_args()
    try:
        device = choose_device(options.device)
    except ConfigError as error:
        sys.stderr.write(f"bench.gpu: not measured: {error.problem}\n")
        print_result("gpu", {}, {}, options.json)
        return
    with tempfile.TemporaryDirectory() as scratch:
        directory, config = options.model or Path(scratch), SHAPES[options.shape]()
        make_model(directory, config, device)
        worker = Worker(directory, device)
        try:
            run(worker, config, ReadRate(device), options.json)
        finally:
            worker.close()


def run(worker: Worker, config: PretrainedConfig, rate: ReadRate, as_json: bool) -> None:
    """Measure, and print the result."""
    warm = {"temperature": 1.0, "top_k": 50, "top_p": 0.95}
    sides: dict[str, Callable[[], float]] = {
        "read": rate,
        **{f"b{batch}": partial(worker.step_seconds, batch, temperature=0.0) for batch in BATCHES},
        f"b{BATCHES[-1]}_t1": partial(worker.step_seconds, BATCHES[-1], **warm),
    }
    alternate(sides, 1)  # warm-up
    measured = medians(alternate(sides, ROUNDS))
    ratios = {
        f"decode_b{batch}": round(decode_bytes(config, batch) / measured["read"] / measured[f"b{batch}"], 3)
        for batch in BATCHES
    }
    last = f"b{BATCHES[-1]}"
    ratios[f"t1_vs_greedy_{last}"] = round(measured[last] / measured[f"{last}_t1"], 3)
    values = {
        "read_gb_s": round(measured["read"] / 1e9, 1),
        **{f"step_ms_{name}": round(took * 1e3, 3) for name, took in measured.items() if name != "read"},
        "kv_tokens": worker.memory.total_tokens,
    }
    print_result("gpu", ratios, values, as_json)


if __name__ == "__main__":
    main()
