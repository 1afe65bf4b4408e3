"""The arguments of `baton replay`. The simulator itself is imported when the command runs."""

from __future__ import annotations

import argparse
from pathlib import Path

from simulator.options import Schedule, SimulationOptions

HELP = """Replay TRACE in virtual time: the product's router over modelled workers. TRACE is a file in
Mooncake's format (timestamp in ms, input_length, output_length, hash_ids of 512-token blocks) or a generated
one, KIND:SEED, where KIND is chat, hot, agents, long, tenants, diurnal or shift. `--policy all` compares
every policy: the sustained rate of each is the highest speed-up at which 90% of requests meet both
objectives. `--autoscale slo` compares scaling on objectives with a fixed fleet and with scaling by load, and
workers that switch roles with fixed ratios. docs/routing.md has the model, docs/scaling.md the policies."""
_DEFAULTS = SimulationOptions()


def add_arguments(replay: argparse.ArgumentParser) -> None:
    """Add the flags of `baton replay`; a flag that is not given leaves the option at its default."""
    replay.add_argument("trace", metavar="TRACE", help="a file, or KIND:SEED of a generated one")
    replay.add_argument("--policy", metavar="NAME[,...]", help=f"or all (default {_DEFAULTS.policy})")
    _add_cluster(replay)
    _add_seconds(replay, "--slo-ttft", "time to first token, at most", _DEFAULTS.slo_ttft_s)
    _add_seconds(replay, "--slo-itl", "a request's mean time between tokens, at most", _DEFAULTS.slo_itl_s)
    replay.add_argument(
        "--speed", metavar="X[,...]", help=f"arrivals so many times faster (default {_DEFAULTS.speed:g})"
    )
    _add_count(replay, "--seed", "seed of the policies' random choices", _DEFAULTS.seed)
    replay.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE",
        help="any option of the simulation, dotted: worker.chunk_tokens=2048, weights.temperature=100",
    )  # fmt: skip
    replay.add_argument(
        "--autoscale", choices=("slo",), help="compare ways to scale the fleet; the others are swept"
    )
    replay.add_argument("--json", action="store_true", help="one JSON object instead of the table")
    replay.add_argument(
        "--png", type=Path, metavar="FILE", help="draw the curves over the speed (needs matplotlib)"
    )
    replay.set_defaults(run=_run)


def _add_cluster(replay: argparse.ArgumentParser) -> None:
    """What is simulated."""
    _add_count(replay, "--prefill", "prefill workers", _DEFAULTS.prefill)
    _add_count(replay, "--decode", "decode workers", _DEFAULTS.decode)
    replay.add_argument(
        "--colocated", action="store_true", help="no prefill workers: the decode workers do everything"
    )
    _add_count(replay, "--routers", "router replicas", _DEFAULTS.routers)
    worker = _DEFAULTS.worker
    replay.add_argument(
        "--schedule",
        choices=tuple(Schedule),
        help=f"what a worker computes first (default {worker.schedule})",
    )
    _add_count(replay, "--prefill-rate", "prompt tokens/s of a worker", worker.prefill_tokens_per_s)
    _add_count(replay, "--kv-tokens", "KV capacity of a worker", worker.kv_tokens)
    _add_count(replay, "--hicache-ratio", "host memory for KV, over --kv-tokens", worker.hicache_ratio)
    _add_count(replay, "--hicache-size", "the same in GB, instead of the ratio", worker.hicache_size)
    replay.add_argument(
        "--peer-fetch",
        action=argparse.BooleanOptionalAction,
        help="workers fetch KV from those that the router names (default: under kv; never: prefix-affinity)",
    )


def _add_count(replay: argparse.ArgumentParser, flag: str, text: str, default: float) -> None:
    replay.add_argument(flag, type=type(default), metavar="N", help=f"{text} (default {default:.12g})")


def _add_seconds(replay: argparse.ArgumentParser, flag: str, text: str, default: float) -> None:
    replay.add_argument(flag, type=float, metavar="S", help=f"{text} (default {default:g})")


def _run(arguments: argparse.Namespace) -> int:
    from simulator.replay import replay

    return replay(arguments)
