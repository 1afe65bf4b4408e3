"""What tenants gain by sharing what is everybody's, and what they lose: `python -m bench.tenancy --json`.

Half an hour of 60 tenants in virtual time, on the product's scheduler and cache (bench/tenancy_rig.py): 4
system prompts, 40 documents that 30 to 60 tenants read, conversations, tenants' own documents, and for one in
fifty private prompts a stranger who asks the same text two seconds later (bench/tenancy_trace.py). K = 2, and
an epoch lasts 10 s. Three modes: `separate` (nothing is shared), `ours`, and `shared` (everybody is one
tenant). `ratios`:

    common_hits       prompt tokens of common texts from the cache, ours / shared
    all_hits          the same of all prompts
    others_hit_rate   share of the others' prompts from the cache, while one tenant sends ten times as much
                      (new documents of its own) / in the same ten minutes without that
    others_ttft_p95   their time to the first token, likewise

`values`:

    private_tokens_shared   tokens that a tenant was given from the cache in mode ours, of pages that it had
                            not asked before and that fewer than K others had
    seen_by_stranger_if_shared   the same of the strangers in mode shared: what could have been given away
    modes             by mode: hit_tokens, common_hit_tokens, ttft_p50 (s), goodput (requests answered within
                      SLO_S each second)

`--png FILE` also measures and draws what K and the epoch's length cost (`curves`).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from bench.common import argument_parser, print_result
from bench.tenancy_rig import Served, TenancyRig, Worker, sharing
from bench.tenancy_trace import LENGTH_S, TENANTS, TenantRequest, TenantTraces, overheard
from kvcache.tenancy.config import TenancyConfig

POOL_TOKENS = 1 << 17
SLO_S = 0.5
USERS = 2
EPOCH_S = 10.0
STRANGERS = 0.02  # of the private prompts
NOISY = "tenant 0"
USERS_CURVE = (2, 3, 5, 8, 12)
EPOCHS_CURVE = (1.0, 10.0, 60.0, 300.0)


def serve(
    trace: Sequence[TenantRequest], tenancy: TenancyConfig | None = None, *, one_tenant: bool = False
) -> list[Served]:
    """Answer a trace on a fresh worker."""
    worker = Worker(POOL_TOKENS, tenancy or TenancyConfig(), one_tenant)
    return TenancyRig(worker, USERS).serve(trace)


def summary(served: Sequence[Served]) -> dict[str, float]:
    """The values of one mode."""
    times = np.array([one.ttft_s for one in served])
    return {
        "hit_tokens": sum(one.cached for one in served),
        "common_hit_tokens": sum(one.common_hits for one in served),
        "prompt_tokens": sum(len(one.request.prompt) for one in served),
        "ttft_p50": round(float(np.median(times)), 3),
        "ttft_p95": round(float(np.quantile(times, 0.95)), 3),
        "goodput": round(float((times <= SLO_S).sum()) / LENGTH_S, 3),
    }


def _others(served: Sequence[Served]) -> tuple[float, float]:
    """In the middle third, of all but the noisy tenant: the hit rate and the 95th percentile of TTFT."""
    during = [
        one
        for one in served
        if one.request.tenant != NOISY and LENGTH_S / 3 <= one.request.at_s < LENGTH_S * 2 / 3
    ]
    asked = sum(len(one.request.prompt) for one in during)
    return sum(one.cached for one in during) / asked, float(np.quantile([one.ttft_s for one in during], 0.95))


def burst(traces: TenantTraces, usual: Sequence[TenantRequest]) -> dict[str, tuple[float, float]]:
    """What the others have of it, with and without."""
    noise = traces.burst(usual, NOISY)
    loud = sorted([*usual, *noise], key=lambda one: one.at_s)
    return {
        name: _others(serve(trace, sharing(USERS, EPOCH_S)))
        for name, trace in (("without", usual), ("with", loud))
    }


def curves(trace: Sequence[TenantRequest], shared: int) -> dict[str, dict[str, float]]:
    """By K and by the length of an epoch: hits on common texts, over those where all is shared."""

    def gain(users: int, epoch_s: float) -> float:
        served = serve(trace, sharing(users, epoch_s))
        return round(sum(one.common_hits for one in served) / shared, 4)

    return {
        f"{epoch_s:g}": {str(users): gain(users, epoch_s) for users in USERS_CURVE}
        for epoch_s in EPOCHS_CURVE
    }


def main() -> None:
    """Measure, print, draw."""
    parser = argument_parser(__doc__)
    parser.add_argument("--seed", type=int, default=19)
    parser.add_argument("--png", type=Path, help="draw what K and epochs cost to this file")
    given = parser.parse_args()
    traces = TenantTraces(given.seed)
    usual = traces.usual()
    trace = sorted([*usual, *overheard(usual, STRANGERS, given.seed)], key=lambda one: one.at_s)
    modes = {
        "separate": serve(trace),
        "ours": serve(trace, sharing(USERS, EPOCH_S)),
        "shared": serve(trace, one_tenant=True),
    }
    told = {name: summary(served) for name, served in modes.items()}
    others = burst(traces, usual)
    ratios = {
        "common_hits": round(told["ours"]["common_hit_tokens"] / told["shared"]["common_hit_tokens"], 4),
        "all_hits": round(told["ours"]["hit_tokens"] / told["shared"]["hit_tokens"], 4),
        "others_hit_rate": round(others["with"][0] / others["without"][0], 4),
        "others_ttft_p95": round(others["with"][1] / others["without"][1], 4),
    }
    values: dict[str, Any] = {
        "private_tokens_shared": sum(one.foreign for one in modes["ours"]),
        "seen_by_stranger_if_shared": sum(
            one.foreign for one in modes["shared"] if one.request.tenant == "stranger"
        ),
        "modes": told,
        "requests": len(trace),
        "tenants": TENANTS,
        "others_in_burst": {
            name: {"hit_rate": round(rate, 3), "ttft_p95": round(ttft, 3)}
            for name, (rate, ttft) in others.items()
        },
    }
    if given.png is not None:
        from bench.tenancy_plot import draw  # imports matplotlib, which is optional

        values["curves"] = curves(trace, int(told["shared"]["common_hit_tokens"]))
        draw(values, given.png)
    print_result("tenancy", ratios, values, given.json)


if __name__ == "__main__":
    main()
