"""The router's HTTP and token path at speed.

    python -m bench.router --json [--bare-only] [--secured] [--ingress proxy]
                           [--url http://HOST:PORT --served-model NAME]

Fake workers in processes of their own (bench/fake_worker, compiled) send one `Tokens` message per token. The
router writes one event per token to a compiled load generator (bench/load_generator), which keeps 1, 16 or 64
connections busy with prompts of 256 tokens, all different, and checks every answer. `bare` is `python -m
router --processes N`; `secured` is the same with API keys and a cluster secret, so that all messages speak
CURVE; `serve` is the same under Ray Serve in N replicas, with HAProxy and the switches of
deploy/cluster.yaml. They are measured alternately; each figure is the median of the rounds.

The fake workers need Debian's libzmq3-dev and libmsgpack-cxx-dev.

`values`: {bare, secured, serve, url: {
    rps_1, rps_16, rps_64             requests/s at so many connections, 16 tokens each
    added_ms_1, _16, _64              time to the first event's first byte, less the worker's own share of it
    rps_64_by_tokens: {1, 4, 16}      requests/s at 64 connections by tokens per answer
    router_cpu_us_per_request, _per_token   CPU time of the router at 64 connections: a line through the
                                      answers of 1 and of 16 tokens; steadier than rps if cores are shared
    load_cpu_share                    the largest share of a core that the load generator used},
    processes                         of each router
    tokenize_256_p50_us               time to encode one of the prompts, in this process}
`ratios`: serve_vs_bare_rps_64, serve_vs_bare_added_ms_1; secured_vs_bare_rps_1, _rps_64,
_router_cpu_us_per_request, _router_cpu_us_per_token.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from bench.common import argument_parser, print_result
from bench.router_rig import (
    ROOT,
    Endpoint,
    LoadGenerator,
    Shot,
    bare_router,
    served_router,
    tokenize_p50_us,
    worker_own_ms,
    workers,
    write_prompts,
)
from bench.router_serve import INGRESSES
from common.compile import BuildError

_CELLS = ((1, 16), (16, 16), (64, 16), (64, 4), (64, 1))
"""(connections, tokens per answer)"""
Cell = tuple[int, int]


class RouterUnderTest:
    """One system under test, and its measurements in each cell."""

    def __init__(self, at: Endpoint, load: LoadGenerator, has_workers: bool) -> None:
        self._at = at
        self._load = load
        self._has_workers = has_workers  # ours, which report their own share of the time
        self._shots: dict[Cell, list[Shot]] = {cell: [] for cell in _CELLS}
        self._added_ms: dict[Cell, list[float]] = {cell: [] for cell in _CELLS}

    def warm(self) -> None:
        """Send requests until caches are filled and connections open."""
        self._load.fire(self._at, 16, 16, 1.0)
        self._own_ms()

    def measure(self, cell: Cell, seconds: float) -> Shot:
        """Measure one cell once."""
        shot = self._load.fire(self._at, *cell, seconds)
        self._shots[cell].append(shot)
        self._added_ms[cell].append(shot.first_ms - self._own_ms())
        return shot

    def summary(self) -> dict[str, Any]:
        """The values that the module's docstring names."""
        rps = {cell: statistics.median(shot.rps for shot in shots) for cell, shots in self._shots.items()}
        values: dict[str, Any] = {}
        for connections in (1, 16, 64):
            values[f"rps_{connections}"] = round(rps[connections, 16], 1)
            added = statistics.median(self._added_ms[connections, 16])
            values[f"added_ms_{connections}"] = round(added, 3)
        values["rps_64_by_tokens"] = {str(tokens): round(rps[64, tokens], 1) for tokens in (1, 4, 16)}
        if self._has_workers:
            one, sixteen = self._router_us((64, 1)), self._router_us((64, 16))
            per_token = (sixteen - one) / 15
            values["router_cpu_us_per_request"] = round(one - per_token, 1)
            values["router_cpu_us_per_token"] = round(per_token, 1)
        shares = [shot.load_cpu_share for shots in self._shots.values() for shot in shots]
        values["load_cpu_share"] = max(shares)
        return values

    def _own_ms(self) -> float:
        return (worker_own_ms(self._at) or 0.0) if self._has_workers else 0.0

    def _router_us(self, cell: Cell) -> float:
        return statistics.median(shot.router_us or 0.0 for shot in self._shots[cell])


def _start(cleanup: ExitStack, given: argparse.Namespace, prompts: Path) -> dict[str, RouterUnderTest]:
    """Start every system under test."""
    ours = LoadGenerator(prompts, given.chat)
    sides = {}
    scratch = prompts.parent
    routers = {"bare": bare_router(given.model, "m", scratch, given.processes)}
    if given.secured:
        routers["secured"] = bare_router(given.model, "m", scratch, given.processes, secured=True)
    if not given.bare_only:
        routers["serve"] = served_router(given.model, "m", scratch, given.ingress, given.processes)
    for name, router in routers.items():
        at, directory = cleanup.enter_context(router)
        cleanup.enter_context(workers(at, directory, given.step_ms))
        sides[name] = RouterUnderTest(at, ours, has_workers=True)
    if given.url:
        where = urlsplit(given.url)
        at = Endpoint(where.hostname or "127.0.0.1", where.port or 80, given.served_model)
        theirs = LoadGenerator(prompts, given.chat, exact=False, extra=given.extra)
        sides["url"] = RouterUnderTest(at, theirs, has_workers=False)
    return sides


def main() -> None:
    """Start everything, measure alternately, print."""
    parser = argument_parser(__doc__)
    parser.add_argument("--bare-only", action="store_true", help="without Ray Serve")
    parser.add_argument(
        "--secured", action="store_true", help="also bare with API keys and a cluster secret (CURVE)"
    )
    parser.add_argument("--ingress", choices=INGRESSES, default="haproxy", help="of Ray Serve")
    parser.add_argument("--url", help="another system, OpenAI-compatible, at an IPv4 address")
    parser.add_argument("--served-model", default="m", help="model name to ask it for")
    parser.add_argument(
        "--extra", default='{"ignore_eos": true}', help="further fields of its requests, as JSON"
    )
    parser.add_argument("--chat", action="store_true", help="/v1/chat/completions instead of completions")
    parser.add_argument("--processes", type=int, default=min(4, os.cpu_count() or 1), help="of each router")
    parser.add_argument("--model", type=Path, default=ROOT / "deploy/demo_model", help="whose tokenizer")
    parser.add_argument("--prompts", type=int, default=6000, help="how many different ones")
    parser.add_argument("--seconds", type=float, default=2.0, help="of each shot")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--step-ms", type=float, default=0.0, help="between two tokens of one answer; 0: as they can"
    )
    given = parser.parse_args()
    given.model = given.model.resolve()
    with ExitStack() as cleanup:
        # Unix sockets of Ray and HAProxy lie below: the path must be short.
        prompts = Path(
            cleanup.enter_context(tempfile.TemporaryDirectory(prefix="bb-", dir="/tmp")), "prompts"
        )
        write_prompts(prompts, given.model, given.prompts)
        tokenize_us = round(tokenize_p50_us(given.model, prompts), 1)
        try:
            sides = _start(cleanup, given, prompts)
        except BuildError as error:
            raise SystemExit(str(error)) from None
        for side in sides.values():
            side.warm()
        for number in range(given.rounds):
            for cell in _CELLS:
                for name, side in sides.items():
                    shot = side.measure(cell, given.seconds)
                    print(
                        f"round {number + 1}/{given.rounds} {name} c{cell[0]} t{cell[1]}: {shot}", flush=True
                    )
        values: dict[str, Any] = {name: side.summary() for name, side in sides.items()}
        values["processes"] = given.processes
        values["tokenize_256_p50_us"] = tokenize_us
    ratios = {}
    if "serve" in values:
        for key in ("rps_64", "added_ms_1"):
            ratios[f"serve_vs_bare_{key}"] = round(values["serve"][key] / values["bare"][key], 3)
    if "secured" in values:
        for key in ("rps_1", "rps_64", "router_cpu_us_per_request", "router_cpu_us_per_token"):
            ratios[f"secured_vs_bare_{key}"] = round(values["secured"][key] / values["bare"][key], 3)
    print_result("router", ratios, values, given.json)


if __name__ == "__main__":
    main()
