"""The command `baton bench`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import sys
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from cluster.load.api_client import API_KEY, ApiClient
from cluster.load.report import draw, figures, table
from cluster.load.run import Load, Measured, Sender
from cluster.load.workload import Workload, random_workload, read_workload
from common.errors import ConfigError

HELP = (
    "Send completions to a server with OpenAI's API and print throughput, and percentiles of the times to "
    "the first token, between tokens and of whole requests. The prompts of one run are new to the server: "
    "its prefix cache finds nothing but --prefix-len. The server's API key is read from OPENAI_API_KEY."
)
_WARM_UP = 2  # requests, not counted


def add_arguments(bench: argparse.ArgumentParser) -> None:
    """Its arguments."""
    bench.add_argument("url", metavar="URL", help="of the server, http://HOST:PORT")
    bench.add_argument("--model", help="its name there (default: the first of /v1/models)")
    bench.add_argument(
        "--concurrency",
        default="1,8",
        metavar="N[,N...]",
        help="requests at once; several are measured one after another (default: %(default)s)",
    )
    bench.add_argument(
        "--request-rate",
        metavar="R[,R...]",
        help="instead: requests per second, at random (a Poisson process)",
    )
    bench.add_argument("--num-prompts", type=int, default=64, help="requests of each run (%(default)s)")
    bench.add_argument(
        "--input-len", type=int, default=256, help="words of a prompt, about a token each (%(default)s)"
    )
    bench.add_argument(
        "--prefix-len", type=int, default=0, help="of these the first are the same in all prompts (0)"
    )
    bench.add_argument("--output-len", type=int, default=64, help="tokens of an answer (%(default)s)")
    bench.add_argument(
        "--prompts", type=Path, metavar="FILE", help="instead: a prompt on each line, plain or JSON"
    )
    bench.add_argument(
        "--stop-at-eos", action="store_true", help="answers may be shorter, and no `ignore_eos` is sent"
    )
    bench.add_argument("--temperature", type=float, default=0.0, help="(%(default)s)")
    bench.add_argument("--seed", type=int, help="of prompts and arrivals (default: another one each time)")
    bench.add_argument("--json", action="store_true", help="print JSON")
    bench.add_argument("--png", type=Path, metavar="FILE", help="draw the distributions")
    bench.set_defaults(run=_bench)


def _bench(arguments: argparse.Namespace) -> int:
    seed = random.getrandbits(31) if arguments.seed is None else arguments.seed
    runs = asyncio.run(_measure(arguments, _loads(arguments, seed), seed))
    found = [figures(run) for run in runs]
    if arguments.json:
        print(json.dumps([asdict(one) for one in found]))
    else:
        Console(highlight=False).print(table(found))
    for one in found:
        for failure, count in one.failures.items():
            print(f"baton: {one.name}: {count} x {failure}", file=sys.stderr)
    if arguments.png is not None:
        draw(runs, arguments.png)
    return 1 if any(one.failures for one in found) else 0


async def _measure(arguments: argparse.Namespace, loads: list[Load], seed: int) -> list[Measured]:
    bar = Progress(console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())
    async with ApiClient(arguments.url, os.environ.get(API_KEY)) as client:
        model = arguments.model or await client.only_model()
        sender = Sender(client, model, not arguments.stop_at_eos, arguments.temperature)
        warm = random_workload(_WARM_UP, 16, 0, 4, seed)
        await sender.run(warm, Load(concurrency=1), lambda: None)
        measured = []
        with bar:
            for number, load in enumerate(loads):
                workload = _workload(arguments, (seed << 8) + number)
                task = bar.add_task(load.name, total=len(workload.prompts))
                measured.append(await sender.run(workload, load, lambda task=task: bar.advance(task)))  # type: ignore[misc]
    return measured


def _workload(arguments: argparse.Namespace, seed: int) -> Workload:
    """The prompts of a run. Those of no two runs are the same, unless they are from a file."""
    count, output = arguments.num_prompts, arguments.output_len
    if arguments.prompts is not None:
        return read_workload(arguments.prompts, count, output)
    return random_workload(count, arguments.input_len, arguments.prefix_len, output, seed)


def _loads(arguments: argparse.Namespace, seed: int) -> list[Load]:
    """Raises ConfigError."""
    for key, least in (("num_prompts", 1), ("input_len", 1), ("prefix_len", 0), ("output_len", 1)):
        given: int = getattr(arguments, key)
        if given < least:
            flag = f"--{key.replace('_', '-')}"
            raise ConfigError(flag, f"{given} is too small", f"give at least {least}")
    if arguments.request_rate is not None:
        rates = _numbers("--request-rate", arguments.request_rate)
        return [Load(per_s=rate, seed=seed) for rate in rates]
    several = _numbers("--concurrency", arguments.concurrency)
    if any(one != int(one) for one in several):
        raise ConfigError("--concurrency", f"{arguments.concurrency} are not whole numbers", "give 1,8")
    return [Load(concurrency=int(one)) for one in several]


def _numbers(flag: str, text: str) -> list[float]:
    try:
        numbers = [float(one) for one in text.split(",")]
    except ValueError:
        numbers = []
    if not numbers or not all(0 < one < float("inf") for one in numbers):
        raise ConfigError(flag, f"{text!r} is not a list of positive numbers", "give one, or 1,8")
    return numbers
