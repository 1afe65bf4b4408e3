"""The output of `baton replay`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from simulator.autoscale import Comparison
from simulator.summary import Summary
from simulator.sweep import SHARE

_COLUMNS = (
    ("policy", "policy", "{:<16}"), ("speed", "speed", "{:>6.3f}"), ("attain", "attainment", "{:>7.1%}"),
    ("goodput/s", "goodput", "{:>9.3f}"), ("ttft p50", "ttft_p50", "{:>8.3f}"),
    ("p90", "ttft_p90", "{:>7.2f}"), ("p99", "ttft_p99", "{:>7.2f}"), ("itl ms p50", "itl_p50", "{:>10.1f}"),
    ("p90", "itl_p90", "{:>6.1f}"), ("p99", "itl_p99", "{:>6.1f}"), ("gap p50", "gap_p50", "{:>7.1f}"),
    ("p99", "gap_p99", "{:>6.1f}"), ("hits", "hit_rate", "{:>6.1%}"),
    ("fetched", "fetched_rate", "{:>7.1%}"), ("loaded", "loaded_rate", "{:>6.1%}"),
    ("moved", "moved_rate", "{:>6.1%}"),
    ("alone", "alone_rate", "{:>6.1%}"), ("P max/mean", "prefill_spread", "{:>10.2f}"),
    ("D max/mean", "decode_spread", "{:>10.2f}"),
)  # fmt: skip
_FLEET = "{:<10} {:>7} {:>9} {:>12} {:>8} {:>7}  {}"
_SHOWN_RATIOS = ("kv/round-robin", "kv/least-loaded", "kv/prefix-affinity", "hot")


def as_json(result: Mapping[str, Any]) -> str:
    """The result as one line of JSON."""
    return json.dumps({**result, "runs": [one.as_dict() for one in result["runs"]]}, allow_nan=False) + "\n"


def as_table(result: Mapping[str, Any], hot_trace: str) -> str:
    """One line per run. After a comparison also the sustained rates, and their ratios in the last line."""
    lines = [" ".join(_width(form).format(title) for title, _, form in _COLUMNS)]
    lines += [
        " ".join(form.format(_value(one, name)) for _, name, form in _COLUMNS) for one in result["runs"]
    ]
    if "ratios" in result:
        for key, title in (("sustained", "sustained rate"), ("sustained_hot", f"on {hot_trace}")):
            rates = "  ".join(f"{policy} {rate:.2f}" for policy, rate in result[key].items())
            lines.append(f"{title}, {SHARE:.0%} of requests meet both objectives: {rates}")
        lines.append(" ".join(f"{name}={_ratio(result['ratios'][name])}" for name in _SHOWN_RATIOS))
    return "\n".join(lines) + "\n"


def comparison_table(found: Comparison) -> str:
    """One line per fleet of a comparison."""
    lines = [_FLEET.format("fleet", "attain", "goodput/s", "worker-hours", "ttft p90", "p99", "setting")]
    for name, setting, one in found:
        figures = (one.goodput, one.worker_hours, one.ttft_p90, one.ttft_p99)
        shown = (f"{figure:.2f}" for figure in figures)
        lines.append(_FLEET.format(name, f"{one.attainment:.1%}", *shown, setting))
    return "\n".join(lines) + "\n"


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f}"


def _width(form: str) -> str:
    """The format of a column's title."""
    return form.split(".")[0].rstrip("}") + "}"


def _value(one: Summary, name: str) -> Any:
    value = getattr(one, name)
    return value * 1000 if name.startswith(("itl", "gap")) else value
