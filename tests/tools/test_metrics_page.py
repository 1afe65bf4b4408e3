"""docs/metrics.md and Grafana's dashboard have the metrics that a router exports, and no others."""

from __future__ import annotations

import json
import re

import pytest
from prometheus_client.core import Metric

from tools.grafana_dashboard import FILE, queries, text
from tools.metrics_page import PAGE, labels_of, metrics, with_tables

_VLLM_DASHBOARD = (
    "e2e_request_latency_seconds_bucket", "e2e_request_latency_seconds_sum", "prompt_tokens_total",
    "generation_tokens_total", "time_per_output_token_seconds_bucket", "time_per_output_token_seconds_count",
    "num_requests_running", "num_requests_waiting", "time_to_first_token_seconds_bucket",
    "time_to_first_token_seconds_sum", "gpu_cache_usage_perc", "request_prompt_tokens_bucket",
    "request_generation_tokens_bucket", "request_success_total", "request_queue_time_seconds_sum",
    "request_prefill_time_seconds_sum", "request_decode_time_seconds_sum",
    "request_max_num_generation_tokens_sum",
)  # fmt: skip
"""What vLLM's published dashboard asks for (examples/online_serving/prometheus_grafana/grafana.json)."""


def samples_of(metric: Metric) -> dict[str, frozenset[str]]:
    """The names under which its samples are scraped, with their labels."""
    labels = frozenset(labels_of(metric))
    if metric.type == "histogram":
        names = {f"{metric.name}_{part}": labels for part in ("sum", "count")}
        return {**names, f"{metric.name}_bucket": labels | {"le"}}
    return {f"{metric.name}_total" if metric.type == "counter" else metric.name: labels}


@pytest.fixture(scope="module")
def found() -> dict[str, Metric]:
    return metrics()


def test_the_page_has_every_metric(found: dict[str, Metric]) -> None:
    page = PAGE.read_text()
    assert page == with_tables(page, found), "run: python -m tools.metrics_page"
    assert all(metric.documentation for metric in found.values())


def test_the_dashboard_is_what_the_tool_writes() -> None:
    assert FILE.read_text() == text(), "run: python -m tools.grafana_dashboard"
    panels = [panel for panel in json.loads(FILE.read_text())["panels"] if panel["type"] == "timeseries"]
    shown = {panel["title"]: [one["expr"] for one in panel["targets"]] for panel in panels}
    assert shown == queries()


def test_every_query_names_metrics_and_labels_that_are_there(found: dict[str, Metric]) -> None:
    labels = {name: of for metric in found.values() for name, of in samples_of(metric).items()}
    for expression in (one for panel in queries().values() for one in panel):
        named = re.findall(r"(baton_\w+)(?:\{([^}]*)\})?", expression)
        assert named, expression
        grouped = set(", ".join(re.findall(r"by \(([^)]*)\)", expression)).split(", ")) - {""}
        for name, matchers in named:
            assert name in labels, expression
            assert grouped | set(re.findall(r"(\w+)=", matchers)) <= labels[name], expression


def test_every_metric_of_vllms_dashboard_has_an_alias() -> None:
    page = PAGE.read_text()
    aliases = set(re.findall(r"`vllm:(\w+)`", page))
    for asked in _VLLM_DASHBOARD:
        assert asked in aliases or re.sub(r"_(bucket|sum|count|total)$", "", asked) in aliases, asked
