"""What tenants gain by sharing what is everybody's, and what they lose: `python -m bench.tenancy --json`.

Half an hour of 60 tenants in virtual time, on the product's scheduler and cache (bench/tenancy_rig.py): 4
system prompts, 40 documents that 30 to 60 tenants read, conversations, tenants' own documents, and for one in
fifty private prompts a stranger who asks the same text two seconds later (bench/tenancy_trace.py). K = 2, and
an epoch lasts 10 s. Three modes: `separate` (nothing is shared), `ours`, and `shared` (everybody is one
tenant). `ratios`:

    common_hits       prompt tokens of common texts from the cache, ours / shared
    all_hits          the same of all prompts
    others_hit_rate   share of the others' prompts from the cache, while one tenant sends ten times as much
                      as usual / in the same ten minutes without that; of five such traces together, for the
                      95th percentile of one depends on a few long prompts
    others_ttft_p95   their time to the first token, likewise. Half of the memory is public pages' at least,
                      and a tenant has at most a twentieth
    shares_heavy_*    both, where the burst is new documents of 512 to 1,536 tokens alone
    no_shares_*       both, without such shares of the memory

`values`:

    private_tokens_shared   tokens that a tenant was given from the cache in mode ours, of pages that it had
                            not asked before and that fewer than K others had
    seen_by_stranger_if_shared   the same of the strangers in mode shared: what could have been given away
    modes             by mode: hit_tokens, common_hit_tokens, ttft_p50 (s), goodput (requests answered within
                      SLO_S each second)

`--png FILE` also measures and draws what K, the length of an epoch and a small pool cost (`curves`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from bench.common import argument_parser, print_result
from bench.tenancy_rig import Served, TenancyRig, Worker, sharing
from bench.tenancy_trace import LENGTH_S, TENANTS, TenantRequest, TenantTraces, overheard
from kvcache.shares.config import SharesConfig, TenantShare
from kvcache.tenancy.config import TenancyConfig

POOL_TOKENS = 1 << 17
SLO_S = 0.5
USERS = 2
EPOCH_S = 10.0
STRANGERS = 0.02  # of the private prompts
NOISY = "tenant 0"
BURST_TRACES = 5
SHARES = SharesConfig({"": TenantShare(min_share=0.5)}, TenantShare(min_share=0.4 / TENANTS, max_share=0.05))
USERS_CURVE = (2, 3, 5, 8)
EPOCHS_CURVE = (1.0, 10.0, 60.0, 300.0)
POOLS_CURVE = (1 << 17, 1 << 18, 1 << 19, 1 << 20)


def serve(
    trace: Sequence[TenantRequest],
    tenancy: TenancyConfig | None = None,
    *,
    one_tenant: bool = False,
    shares: SharesConfig | None = None,
    pool_tokens: int = POOL_TOKENS,
) -> list[Served]:
    """Answer a trace on a fresh worker."""
    worker = Worker(pool_tokens, tenancy or TenancyConfig(), one_tenant, shares or SharesConfig())
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


class Others(NamedTuple):
    """In the middle third, of all but the noisy tenant."""

    hit_rate: float
    ttft_p95: float


_FIGURES: dict[str, Callable[[Others], float]] = {
    "hit_rate": lambda others: others.hit_rate,
    "ttft_p95": lambda others: others.ttft_p95,
}


class _Answer(NamedTuple):
    """Of one request. Tokens of its prompt, seconds."""

    asked: int
    cached: int
    ttft_s: float


def _during(served: Sequence[Served]) -> list[_Answer]:
    return [
        _Answer(len(one.request.prompt), one.cached, one.ttft_s)
        for one in served
        if one.request.tenant != NOISY and LENGTH_S / 3 <= one.request.at_s < LENGTH_S * 2 / 3
    ]


def _others(answers: Sequence[_Answer]) -> Others:
    rate = sum(one.cached for one in answers) / sum(one.asked for one in answers)
    return Others(rate, float(np.quantile([one.ttft_s for one in answers], 0.95)))


def _burst_answers(seed: int) -> dict[tuple[str, str], list[_Answer]]:
    """Of one trace: without a burst and with both kinds, with and without shares of the memory."""
    traces = TenantTraces(seed)
    usual = traces.usual()
    quiet: dict[str, list[TenantRequest]] = {"none": []}
    noises = quiet | {name: traces.burst(usual, NOISY, name == "heavy") for name in ("usual", "heavy")}
    return {
        (name, kind): _during(serve(_merged(usual, noise), sharing(USERS, EPOCH_S), shares=shares))
        for name, shares in (("shares", SHARES), ("no_shares", None))
        for kind, noise in noises.items()
    }


def bursts(seed: int) -> dict[str, dict[str, Others]]:
    """What the others have without a burst and with both kinds, by whether tenants have shares of memory."""
    with ProcessPoolExecutor() as processes:
        traces = list(processes.map(_burst_answers, range(seed, seed + BURST_TRACES)))
    return {
        name: {
            kind: _others([answer for trace in traces for answer in trace[name, kind]])
            for kind in ("none", "usual", "heavy")
        }
        for name in ("shares", "no_shares")
    }


def _merged(one: Sequence[TenantRequest], other: Sequence[TenantRequest]) -> list[TenantRequest]:
    return sorted([*one, *other], key=lambda request: request.at_s)


def curves(trace: Sequence[TenantRequest]) -> dict[str, dict[str, dict[str, float]]]:
    """Hits on common texts, over those where all is shared: for each K by the length of an epoch (s) and by
    the size of the pool (tokens)."""
    shared = {pool: _common_hits(serve(trace, one_tenant=True, pool_tokens=pool)) for pool in POOLS_CURVE}

    def gain(users: int, epoch_s: float, pool: int) -> float:
        served = serve(trace, sharing(users, epoch_s), pool_tokens=pool)
        return round(_common_hits(served) / shared[pool], 4)

    return {
        "epochs": {
            f"{epoch_s:g}": {str(users): gain(users, epoch_s, POOL_TOKENS) for users in USERS_CURVE}
            for epoch_s in EPOCHS_CURVE
        },
        "pools": {
            str(pool): {str(users): gain(users, EPOCH_S, pool) for users in USERS_CURVE}
            for pool in POOLS_CURVE
        },
    }


def _common_hits(served: Sequence[Served]) -> int:
    return sum(one.common_hits for one in served)


def _ratio(kinds: Mapping[str, Others], kind: str, figure: str) -> float:
    get = _FIGURES[figure]
    return round(get(kinds[kind]) / get(kinds["none"]), 4)


def main() -> None:
    """Measure, print, draw."""
    parser = argument_parser(__doc__)
    parser.add_argument("--seed", type=int, default=19)
    parser.add_argument("--png", type=Path, help="draw what K and epochs cost to this file")
    given = parser.parse_args()
    traces = TenantTraces(given.seed)
    usual = traces.usual()
    trace = _merged(usual, overheard(usual, STRANGERS, given.seed))
    modes = {
        "separate": serve(trace),
        "ours": serve(trace, sharing(USERS, EPOCH_S)),
        "shared": serve(trace, one_tenant=True),
    }
    told = {name: summary(served) for name, served in modes.items()}
    others = bursts(given.seed)
    ratios = {
        "common_hits": round(told["ours"]["common_hit_tokens"] / told["shared"]["common_hit_tokens"], 4),
        "all_hits": round(told["ours"]["hit_tokens"] / told["shared"]["hit_tokens"], 4),
        "others_hit_rate": _ratio(others["shares"], "usual", "hit_rate"),
        "others_ttft_p95": _ratio(others["shares"], "usual", "ttft_p95"),
    }
    for name, kind in (("shares", "heavy"), ("no_shares", "usual"), ("no_shares", "heavy")):
        for figure in _FIGURES:
            ratios[f"{name}_{kind}_{figure}"] = _ratio(others[name], kind, figure)
    values: dict[str, Any] = {
        "private_tokens_shared": sum(one.foreign for one in modes["ours"]),
        "seen_by_stranger_if_shared": sum(
            one.foreign for one in modes["shared"] if one.request.tenant == "stranger"
        ),
        "modes": told,
        "requests": len(trace),
        "tenants": TENANTS,
        "others_in_burst": {
            name: {kind: one._asdict() for kind, one in kinds.items()} for name, kinds in others.items()
        },
    }
    if given.png is not None:
        from bench.tenancy_plot import draw  # imports matplotlib, which is optional

        values["curves"] = curves(trace)
        draw(values, given.png)
    print_result("tenancy", ratios, values, given.json)


if __name__ == "__main__":
    main()
