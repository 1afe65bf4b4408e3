"""Summary: the figures of a run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from simulator.fleet import FleetSize
from simulator.options import SimulationOptions
from simulator.request import Request
from simulator.simulation import Simulation
from wire.records import Role


@dataclass(frozen=True, slots=True)
class Summary:
    """In seconds unless stated. `itl` is over requests (the mean of each), `gap` over all pairs of tokens."""

    policy: str
    speed: float
    requests: int
    attainment: float  # share of all requests that met both objectives
    goodput: float  # of those, per second of the trace; of the run, if all requests come at once
    ttft_p50: float
    ttft_p90: float
    ttft_p99: float
    itl_p50: float
    itl_p90: float
    itl_p99: float
    gap_p50: float
    gap_p99: float
    hit_rate: float  # share of prompt tokens that were cached where the prompt was prefilled
    fetched_rate: float  # share of prompt tokens that were fetched from other workers
    loaded_rate: float  # share of prompt tokens that were loaded from host memory or storage
    moved_rate: float  # share of prompt tokens that were sent to D
    alone_rate: float  # share of requests that D did alone
    prefill_spread: float  # busiest worker's computed prompt tokens over the mean
    decode_spread: float  # the same for output tokens
    restarts: int
    rejected: int
    worker_hours: float  # from the order of each worker to the end of its drain
    fleet: tuple[FleetSize, ...]  # its size at the start, after each change and at the end

    def as_dict(self) -> dict[str, Any]:
        """The figures by name, for JSON."""
        return asdict(self)


def summarise(simulation: Simulation, options: SimulationOptions) -> Summary:
    """Summarise a finished run."""
    requests = simulation.requests
    served = [one for one in requests if not one.rejected]
    good = sum(met(one, options) for one in served)
    ttft = np.array([one.ttft for one in served] or [0.0])
    itl = np.array([one.itl for one in served] or [0.0])
    prompt = max(1, sum(one.trace.prompt_tokens for one in served))
    workers = simulation.members.everyone
    return Summary(
        policy=options.policy,
        speed=options.speed,
        requests=len(requests),
        attainment=good / len(requests),
        goodput=good / _seconds(requests),
        ttft_p50=float(np.quantile(ttft, 0.5)),
        ttft_p90=float(np.quantile(ttft, 0.9)),
        ttft_p99=float(np.quantile(ttft, 0.99)),
        itl_p50=float(np.quantile(itl, 0.5)),
        itl_p90=float(np.quantile(itl, 0.9)),
        itl_p99=float(np.quantile(itl, 0.99)),
        gap_p50=simulation.itl.quantile(0.5),
        gap_p99=simulation.itl.quantile(0.99),
        hit_rate=sum(one.cached_tokens for one in served) / prompt,
        fetched_rate=sum(one.arrivals.fetched_tokens for one in workers) / prompt,
        loaded_rate=sum(one.arrivals.loaded_tokens for one in workers) / prompt,
        moved_rate=sum(one.moved_tokens for one in served) / prompt,
        alone_rate=sum(one.prefill is None for one in served) / max(1, len(served)),
        prefill_spread=_spread([one.prefilled_tokens for one in workers if one.record.role is Role.PREFILL]),
        decode_spread=_spread([one.batch.tokens for one in workers if one.record.role is Role.DECODE]),
        restarts=sum(one.attempts - 1 for one in served),
        rejected=len(requests) - len(served),
        worker_hours=simulation.fleet.worker_hours(),
        fleet=tuple(simulation.fleet.sizes),
    )


def _seconds(requests: Sequence[Request]) -> float:
    """How long a trace is: from the first arrival to the last, or to the last token if these are one."""
    first, last = requests[0].arrived_at, requests[-1].arrived_at
    end = last if last > first else max(one.last_at for one in requests)
    return end - first if end > first else 1.0  # nothing was served


def met(one: Request, options: SimulationOptions) -> bool:
    """Whether a request met both objectives."""
    return one.ttft <= options.slo_ttft_s and one.itl <= options.slo_itl_s


def _spread(load: Sequence[int]) -> float:
    total = sum(load)
    return max(load) * len(load) / total if total else 1.0
