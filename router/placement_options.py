"""Options of placement and admission: what a choice of workers weighs, and which rooms wait."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from common.options import Options


class PolicyWeights(Options):
    """Weights of the `kv` policy's formula (placement/kv_policy.py). The unit of cost is the wait for one
    queued prompt token. The defaults come from `baton replay`, on several kinds of traces
    (docs/routing.md)."""

    prefill_queue: float = Field(1.0, ge=0, description="per prompt token that is queued on P")
    queue_objective: float = Field(
        65_536.0,
        gt=0,
        description="a queue this much longer than the shortest costs twice as much: spreads hot prefixes",
    )
    requests_objective: float = Field(
        32.0,
        gt=0,
        description="prefix-affinity leaves a D with this many requests more than the least loaded one",
    )
    prefill_left: float = Field(
        4.0, ge=0, description="per prompt token that P has to compute, and so delays later requests"
    )
    host_credit: float = Field(
        0.9, ge=0, le=1, description="saved by a token held in CPU memory, as a share of one on the device"
    )
    storage_credit: float = Field(0.6, ge=0, le=1, description="saved by a token held in storage")
    expected_credit: float = Field(0.9, ge=0, le=1, description="saved by a token that is on its way")
    transfer: float = Field(
        0.1, ge=0, description="per prompt token that D does not hold, until transfers are measured; 0: never"
    )
    same_host: float = Field(
        0.2, ge=0, le=1, description="share of `transfer` that is left when P and D share a host"
    )
    same_machine: float = Field(
        0.4, ge=0, le=1, description="the same, in different containers of one machine"
    )
    same_rack: float = Field(0.8, ge=0, le=1, description="the same, in one rack (`rack` of the workers)")
    fetch_start: float = Field(64.0, ge=0, description="per fetch from another worker, besides its tokens")
    fetch_share: float = Field(
        0.25, ge=0, description="a fetch costs this much more for each that its holder has to serve already"
    )
    decode_load: float = Field(32.0, ge=0, description="per request on D")
    decode_context: float = Field(0.002, ge=0, description="per KV token of the requests on D")
    decode_full: float = Field(4.0, ge=0, description="per token for which D has no memory yet")
    decode_prefill: float = Field(4.0, ge=0, description="per prompt token that D computes itself")
    decode_relief: float = Field(
        16_384.0, ge=0,
        description="while every P has more prompt tokens queued than this, D may compute any prompt alone",
    )  # fmt: skip
    session: float = Field(64.0, ge=0, description="deducted for the workers of the session's last request")
    temperature: float = Field(
        0.0,
        ge=0,
        description="0: the cheapest; else a worker of cost c with a probability ~ exp(-c / temperature)",
    )


class AdmissionOptions(Options):
    """Which rooms wait and which are refused (docs/admission.md)."""

    max_in_flight: int = Field(1024, ge=1, description="rooms that run at once; beyond: the queue, or 429")
    max_queued: int = Field(1024, ge=0, description="rooms that wait in the router; beyond: 429. 0: no queue")
    max_queue_s: float = Field(5.0, gt=0, description="a room waits in the queue at most this long; then 429")
    queue_prefill_tokens: int | None = Field(
        None, ge=0,
        description="rooms wait in the queue while every prefill worker has more prompt tokens queued than "
        "this; null: never for that",
    )  # fmt: skip
    queue_decode_full: bool = Field(
        True, description="rooms wait in the queue while no decode worker has memory and a row left"
    )
    max_ttft_s: float | None = Field(
        None, gt=0,
        description="429 at arrival when the first token is predicted to take longer; null: never for that",
    )  # fmt: skip
    tenant_weights: dict[str, Annotated[float, Field(gt=0)]] = Field(
        {}, description="weight of a tenant when rooms wait; tenants that are not named have 1"
    )
    retry_after_s: float = Field(1.0, gt=0, description="Retry-After of a 429 for which nothing is predicted")


class PlacementOptions(Options):
    """Which workers a room gets (docs/routing.md)."""

    policy: str = Field("kv", description="how workers are chosen (docs/routing.md)")
    weights: PolicyWeights = PolicyWeights()
    prefill_on_decode_tokens: int = Field(
        16, ge=0, description="when at most this many prompt tokens are left to compute, D does it alone"
    )
    peer_fetch: bool | None = Field(
        None,
        description="workers are told who holds KV that they lack, and may fetch it; null: under policy `kv`",
    )
    expect_s: float = Field(
        10.0, gt=0, description="pages of a prompt on its way count as held at most this long"
    )
