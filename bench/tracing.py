"""What OpenTelemetry's traces cost: one request in a hundred is sampled, against none.

    python -m bench.tracing --json [--pairs 9] [--model DIR]

Two systems that differ in the variables OTEL_* alone are driven alternately, in pairs. Spans go to a
collector in this process. `ratios`, medians over the pairs, traced / not:

    ttft, itl    of bench.serve: shape M, colocated, one request at a time, two in each pair
    rps_1, rps_64   the same of bench.router's requests per second at 1 and at 64 connections, inverted:
                 more than 1 is slower

`values`: each ratio's pairs, and how many `spans` the collector got.
"""

from __future__ import annotations

import asyncio
import os
import random
import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path

import httpx

from bench.common import argument_parser, print_result
from bench.make_model import make_model
from bench.router_rig import ROOT, Endpoint, LoadGenerator, bare_router, workers, write_prompts
from bench.serve import PROMPT_TOKENS, VOCABULARY, ServerUnderTest, send
from tests.harness.local_stack import stack
from tests.support.otlp_collector import OtlpCollector

_REQUESTS = 2
_SHOT_S = 4.0
_PROMPTS = 6000
Sides = Mapping[str, Callable[[], float]]


@contextmanager
def _traced(url: str | None) -> Iterator[None]:
    """Processes that start inside send one trace in a hundred to `url`; None: none."""
    variables = {
        "OTEL_EXPORTER_OTLP_ENDPOINT": url or "",
        "OTEL_TRACES_SAMPLER": "parentbased_traceidratio",
        "OTEL_TRACES_SAMPLER_ARG": "0.01",
    }
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _pairs(sides: Sides, count: int, name: str) -> list[float]:
    """The quotients traced / plain of pairs; which comes first alternates."""
    quotients = []
    for number in range(count):
        order = list(sides)[:: 1 if number % 2 else -1]
        measured = {side: sides[side]() for side in order}
        quotients.append(measured["traced"] / measured["plain"])
        print(f"{name} pair {number + 1}/{count}: {quotients[-1]:.3f}", flush=True)
    return quotients


def _serving(model: Path, scratch: Path, collector: str, pairs: int) -> dict[str, list[float]]:
    """Quotients of TTFT and ITL."""
    draw = random.Random(0)
    found: dict[str, list[float]] = {"ttft": [], "itl": []}
    with ExitStack() as cleanup:
        urls = {}
        for name, url in (("plain", None), ("traced", collector)):
            with _traced(url):
                running = stack(
                    model, scratch / name, 0, 1,
                    dtype="bfloat16", max_total_tokens=8192, threads=os.cpu_count() or 1,
                )  # fmt: skip
                urls[name] = cleanup.enter_context(running).url

        async def ask(name: str) -> ServerUnderTest:
            side = ServerUnderTest(urls[name], "m")
            async with httpx.AsyncClient(timeout=600.0) as client:
                for _ in range(_REQUESTS):
                    prompt = [draw.randrange(1000, VOCABULARY) for _ in range(PROMPT_TOKENS)]
                    await send(client, side, prompt)
            return side

        for name in urls:
            asyncio.run(ask(name))
        for number in range(pairs):
            order = list(urls)[:: 1 if number % 2 else -1]
            told = {name: asyncio.run(ask(name)) for name in order}
            for figure in found:
                medians = {
                    name: statistics.median(getattr(side, f"{figure}_ms")) for name, side in told.items()
                }
                found[figure].append(medians["traced"] / medians["plain"])
            print(
                f"serving pair {number + 1}/{pairs}: {found['ttft'][-1]:.3f} {found['itl'][-1]:.3f}",
                flush=True,
            )
    return found


def _routing(scratch: Path, collector: str, pairs: int) -> dict[str, list[float]]:
    """Quotients of the time that a request takes, at 1 and at 64 connections."""
    model = ROOT / "deploy/demo_model"
    prompts = scratch / "prompts"
    write_prompts(prompts, model, _PROMPTS)
    load = LoadGenerator(prompts, chat=False)
    with ExitStack() as cleanup:
        ends: dict[str, Endpoint] = {}
        for name, url in (("plain", None), ("traced", collector)):
            (scratch / f"router-{name}").mkdir()
            with _traced(url):
                end, directory = cleanup.enter_context(bare_router(model, "m", scratch / f"router-{name}"))
            cleanup.enter_context(workers(end, directory, 0.0))
            ends[name] = end
            load.fire(end, 16, 16, 1.0)

        def sides(connections: int) -> Sides:
            def seconds(end: Endpoint) -> Callable[[], float]:
                return lambda: 1 / load.fire(end, connections, 16, _SHOT_S).rps

            return {name: seconds(end) for name, end in ends.items()}

        return {f"rps_{count}": _pairs(sides(count), pairs, f"rps_{count}") for count in (1, 64)}


def main() -> None:
    """Measure, print."""
    parser = argument_parser(__doc__)
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--model", type=Path, help="for the serving half; default: shape M, made anew")
    given = parser.parse_args()
    with (
        closing(OtlpCollector()) as collector,
        tempfile.TemporaryDirectory(prefix="bt-", dir="/tmp") as folder,
    ):
        scratch = Path(folder)
        model = given.model or scratch / "model"
        if given.model is None:
            make_model(model)
        found = _routing(scratch, collector.url, given.pairs)
        found |= _serving(model, scratch, collector.url, given.pairs)
        ratios = {name: round(statistics.median(values), 3) for name, values in found.items()}
        pairs = {name: [round(value, 3) for value in values] for name, values in found.items()}
        print_result("tracing", ratios, {**pairs, "spans": len(collector.spans)}, given.json)


if __name__ == "__main__":
    main()
