"""`python -m tools.grafana_dashboard`: write deploy/grafana/baton.json, a Grafana dashboard.

Every router says the figures of all workers. So theirs are the greatest that any router says, and not a sum.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

FILE = Path(__file__).parents[1] / "deploy" / "grafana" / "baton.json"
_MODEL = '{model=~"$model"}'
_SOURCE = {"type": "prometheus", "uid": "${source}"}
_COLUMNS, _WIDTH, _HEIGHT = 3, 8, 8


class _Panel(NamedTuple):
    title: str
    unit: str  # Grafana's name of it
    queries: dict[str, str]  # by legend


def _rate(name: str, by: str = "", where: str = "") -> str:
    return f"sum{f' by ({by})' if by else ''} (rate({name}{where}[$__rate_interval]))"


def _percentiles(name: str, by: str = "", where: str = _MODEL) -> dict[str, str]:
    legend = "".join(f" {{{{{label}}}}}" for label in by.split(", ") if label)
    labels = f"le, {by}" if by else "le"
    return {
        f"p{share * 100:g}{legend}": f"histogram_quantile({share}, {_rate(f'{name}_bucket', labels, where)})"
        for share in (0.5, 0.95, 0.99)
    }


def _mean(name: str, by: str, where: str = "") -> str:
    return f"{_rate(f'{name}_sum', by, where)} / {_rate(f'{name}_count', by, where)}"


def _level(name: str, by: str) -> str:
    return f"max by ({by}) (baton_worker_{name})"


def _growth(name: str, by: str = "worker") -> str:
    return f"max by ({by}) (rate(baton_worker_{name}_total[$__rate_interval]))"


_PAIR = "prefill, decode"
_SENT = "baton_router_pair_transfer_bytes_total"
_SENDING = "baton_router_pair_transfer_seconds_total"
_ROWS: dict[str, list[_Panel]] = {
    "Requests": [
        _Panel("Requests", "reqps", {"{{status}}": _rate("baton_router_requests_total", "status")}),
        _Panel("Time to first token", "s", _percentiles("baton_router_ttft_seconds")),
        _Panel("Between tokens", "s", _percentiles("baton_router_itl_seconds")),
        _Panel("Mean time per output token of a request", "s", _percentiles("baton_router_tpot_seconds")),
        _Panel("Whole request", "s", _percentiles("baton_router_request_seconds")),
        _Panel(
            "Tokens", "short",
            {
                "in": _rate("baton_router_prompt_tokens_total", where=_MODEL),
                "out": _rate("baton_router_output_tokens_total", where=_MODEL),
            },
        ),
        _Panel(
            "Rooms", "short",
            {"running": "sum(baton_router_rooms)", "queued": "sum(baton_router_queued_rooms)"},
        ),
        _Panel(
            "Ends of choices", "short",
            {"{{reason}}": _rate("baton_router_finished_choices_total", "reason", _MODEL)},
        ),
        _Panel(
            "Refused and started again", "short",
            {
                "refused: {{cause}}": _rate("baton_router_rejects_total", "cause"),
                "restarted: {{cause}}": _rate("baton_router_restart_causes_total", "cause"),
            },
        ),
    ],
    "Where the time goes": [
        _Panel("In the router's queue", "s", _percentiles("baton_router_queue_seconds")),
        _Panel("Forwards of a prompt", "s", _percentiles("baton_router_prefill_seconds")),
        _Panel(
            "Mean time in each stage", "s",
            {"{{stage}}": _mean("baton_router_stage_seconds", "stage", _MODEL)},
        ),
    ],
    "Workers": [
        _Panel("Running requests", "short", {"{{worker}}": _level("running_requests", "worker")}),
        _Panel("Waiting requests", "short", {"{{worker}}": _level("waiting_requests", "worker")}),
        _Panel("KV use", "percentunit", {"{{worker}}": _level("kv_usage_ratio", "worker")}),
        _Panel(
            "KV pages", "short",
            {"{{worker}} {{group}} {{state}}": _level("kv_pages", "worker, group, tier, state")},
        ),
        _Panel(
            "Evicted pages", "short",
            {"{{worker}} {{group}}": _growth("evicted_pages", "worker, group, tier")},
        ),
        _Panel(
            "Cached share of prompts", "percentunit",
            {
                "all": f"{_rate('baton_router_cached_tokens_total', where=_MODEL)} / "
                f"{_rate('baton_router_prompt_tokens_total', where=_MODEL)}",
            },
        ),
        _Panel(
            "Tokens found in trees", "short",
            {"{{worker}} {{tier}}": _growth("cached_tokens", "worker, tier")},
        ),
        _Panel("Forward", "s", _percentiles("baton_worker_forward_seconds", "role")),
        _Panel(
            "Mean sequences of a forward", "short",
            {"{{worker}}": _mean("baton_worker_batch_sequences", "worker")},
        ),
        _Panel(
            "Computed tokens", "short",
            {
                "prefill {{worker}}": _growth("prefill_tokens"),
                "decode {{worker}}": _growth("decode_tokens"),
            },
        ),
        _Panel("Retractions", "short", {"{{worker}}": _growth("retractions")}),
        _Panel(
            "Workers", "short",
            {"{{role}}": "max by (role) (baton_router_workers)", "suspected": "max(baton_router_suspected)"},
        ),
    ],
    "KV from prefill to decode": [
        _Panel("Moved", "Bps", {"{{prefill}} to {{decode}}": _rate(_SENT, _PAIR)}),
        _Panel(
            "Speed while pages are written", "Bps",
            {
                "{{prefill}} to {{decode}}": f"{_rate(_SENT, _PAIR)} / {_rate(_SENDING, _PAIR)}",
            },
        ),
        _Panel(
            "Rooms moved between decode workers", "short",
            {"{{state}}": _rate("baton_router_moves_total", "state")},
        ),
    ],
}  # fmt: skip


def dashboard() -> dict[str, Any]:
    """The dashboard, as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    y = 0
    for title, row in _ROWS.items():
        panels.append({"type": "row", "title": title, "gridPos": {"x": 0, "y": y, "w": 24, "h": 1}})
        y += 1
        for number, panel in enumerate(row):
            x, down = number % _COLUMNS * _WIDTH, number // _COLUMNS * _HEIGHT
            panels.append(_drawn(panel, x, y + down))
        y += -(-len(row) // _COLUMNS) * _HEIGHT
    for number, drawn in enumerate(panels):
        drawn["id"] = number + 1
    return {
        "title": "Baton",
        "uid": "baton",
        "schemaVersion": 39,
        "time": {"from": "now-30m", "to": "now"},
        "refresh": "10s",
        "templating": {"list": [_variable("source", "datasource", "prometheus"), _models()]},
        "panels": panels,
    }


def queries() -> dict[str, list[str]]:
    """The queries of each panel, by its title."""
    return {panel.title: list(panel.queries.values()) for row in _ROWS.values() for panel in row}


def _drawn(panel: _Panel, x: int, y: int) -> dict[str, Any]:
    targets = [
        {"refId": chr(ord("A") + number), "datasource": _SOURCE, "expr": expression, "legendFormat": legend}
        for number, (legend, expression) in enumerate(panel.queries.items())
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "datasource": _SOURCE,
        "gridPos": {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "targets": targets,
    }


def _variable(name: str, kind: str, query: str) -> dict[str, Any]:
    return {"name": name, "type": kind, "query": query, "label": name}


def _models() -> dict[str, Any]:
    query = "label_values(baton_router_ttft_seconds_count, model)"
    more = {"datasource": _SOURCE, "refresh": 2, "includeAll": True, "allValue": ".*", "multi": False}
    return {**_variable("model", "query", query), **more}


def text() -> str:
    """The file."""
    return json.dumps(dashboard(), indent=1) + "\n"


if __name__ == "__main__":
    FILE.write_text(text())
