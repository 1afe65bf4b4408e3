"""vLLM's names for what is measured here (`--metrics-compat vllm`): its dashboards and monitors read them.

A figure of the whole service has the label engine="router"; a worker's has the worker's id there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from router.merged_metrics import MetricFamily

_Labels = dict[str, str]


class Alias(NamedTuple):
    name: str  # in vLLM, without "vllm:"
    of: str  # here, without "baton_"
    only: tuple[str, str] | None = None  # a label and the value for which series are taken


ALIASES = (
    Alias("time_to_first_token_seconds", "router_ttft_seconds"),
    Alias("inter_token_latency_seconds", "router_itl_seconds"),
    Alias("time_per_output_token_seconds", "router_itl_seconds"),  # until v0.11
    Alias("request_time_per_output_token_seconds", "router_tpot_seconds"),
    Alias("e2e_request_latency_seconds", "router_request_seconds"),
    Alias("request_queue_time_seconds", "router_stage_seconds", ("stage", "prefill_waiting")),
    Alias("request_prefill_time_seconds", "router_prefill_seconds"),
    Alias("request_decode_time_seconds", "router_decode_seconds"),
    Alias("request_prompt_tokens", "router_request_prompt_tokens"),
    Alias("request_generation_tokens", "router_request_output_tokens"),
    Alias("request_max_num_generation_tokens", "router_request_longest_output_tokens"),
    Alias("request_params_n", "router_request_choices"),
    Alias("request_params_max_tokens", "router_request_max_tokens"),
    Alias("request_success", "router_finished_choices"),
    Alias("prompt_tokens", "router_prompt_tokens"),
    Alias("generation_tokens", "router_output_tokens"),
    Alias("prefix_cache_queries", "router_prompt_tokens"),
    Alias("prefix_cache_hits", "router_cached_tokens"),
    Alias("num_requests_running", "worker_running_requests"),
    Alias("num_requests_waiting", "worker_waiting_requests"),
    Alias("kv_cache_usage_perc", "worker_kv_usage_ratio"),
    Alias("gpu_cache_usage_perc", "worker_kv_usage_ratio"),  # until v0.10
    Alias("num_preemptions", "worker_retractions"),
    Alias("iteration_tokens_total", "worker_batch_tokens"),
    Alias("cache_config_info", "worker_info"),
)
_LABELS = {
    "model": "model_name",
    "worker": "engine",
    "reason": "finished_reason",
    "page_tokens": "block_size",
    "pages": "num_gpu_blocks",
}
"""vLLM's names of labels. It has no others of ours, but for `le`."""


def vllm_aliases(families: list[MetricFamily]) -> Iterator[MetricFamily]:
    """What vLLM would call these metrics, as far as it has them."""
    by_name = {family.name: family for family in families}
    for alias in ALIASES:
        family = by_name.get(f"baton_{alias.of}")
        if family is None:  # no process has answered
            continue
        name = f"vllm:{alias.name}"
        sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        for sample, labels, value in family.samples:
            if alias.only is None or labels[alias.only[0]] == alias.only[1]:
                series = sample.replace(family.name, name, 1), tuple(_renamed(labels).items())
                sums[series] = sums.get(series, 0.0) + value  # of the labels that vLLM does not have
        samples = [(sample, dict(labels), value) for (sample, labels), value in sums.items()]
        yield MetricFamily(name, f"{family.about} ({family.name})", family.kind, samples)


def _renamed(labels: _Labels) -> _Labels:
    named = {_LABELS[name]: value for name, value in labels.items() if name in _LABELS}
    engine = {"engine": named.pop("engine", "router")}
    return named | engine | {name: value for name, value in labels.items() if name == "le"}
