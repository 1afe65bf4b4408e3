"""`baton replay`'s arguments. What it does is simulator, imported when it is wanted."""

from __future__ import annotations

import argparse
from pathlib import Path

HELP = """Replay TRACE in virtual time: the product's router over modelled workers. TRACE is a file in
Mooncake's format (timestamp in ms, input_length, output_length, hash_ids of 512-token blocks) or a generated
one: chat:SEED, hot:SEED, agents:SEED, long:SEED. `--policy all` compares every policy: the sustained rate of
each is the highest speed-up at which 90% of requests meet both objectives. docs/routing.md has the model."""


def add_replay(replay: argparse.ArgumentParser) -> None:
    """Its flags."""
    replay.add_argument("trace", metavar="TRACE", help="a file, or KIND:SEED of a generated one")
    replay.add_argument("--policy", default="kv", metavar="NAME[,...]", help="or all (default %(default)s)")
    replay.add_argument("--prefill", type=int, default=8, metavar="N", help="prefill workers (default 8)")
    replay.add_argument("--decode", type=int, default=8, metavar="N", help="decode workers (default 8)")
    replay.add_argument(
        "--colocated", action="store_true", help="no prefill workers: the decode workers do everything"
    )
    replay.add_argument(
        "--schedule", choices=("prefill-first", "decode-first", "mixed"), help="of a worker (default mixed)"
    )
    replay.add_argument("--routers", type=int, default=1, metavar="N", help="router replicas (default 1)")
    replay.add_argument(
        "--slo-ttft", type=float, default=2.0, metavar="S", help="time to first token, at most (default 2)"
    )
    replay.add_argument(
        "--slo-itl", type=float, default=0.05, metavar="S",
        help="a request's mean time between tokens, at most (default 0.05)",
    )  # fmt: skip
    replay.add_argument(
        "--speed", default="1", metavar="X[,...]", help="arrivals so many times faster (default 1)"
    )
    replay.add_argument("--seed", type=int, default=1, help="of the policies' chance (default 1)")
    replay.add_argument("--prefill-rate", type=float, metavar="N", help="tokens/s of P (default 20000)")
    replay.add_argument("--kv-tokens", type=int, metavar="N", help="of a worker (default 1000000)")
    replay.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="any option of the simulation, dotted: worker.chunk_tokens=2048, weights.temperature=100",
    )  # fmt: skip
    replay.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    replay.add_argument("--png", type=Path, metavar="FILE", help="draw the curves over the speed")
    replay.set_defaults(run=_run)


def _run(arguments: argparse.Namespace) -> int:
    from simulator.replay import replay

    return replay(arguments)
