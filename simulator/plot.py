"""Draws the curves of a sweep. The only module that imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter

from common.errors import ConfigError
from simulator.autoscale import Comparison
from simulator.fleet import FleetSize
from simulator.summary import Summary

_MARKERS = "osv^D*PX"
_STYLES = {"ttft_p50": ":", "ttft_p90": "-", "ttft_p99": "--"}


def draw(runs: Sequence[Summary], slo_ttft_s: float, title: str, path: Path) -> None:
    """Draw attainment, goodput and time to first token over the speed. A policy has a colour and a marker."""
    figure = Figure(figsize=(16, 5), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    share, goodput, ttft = figure.subplots(1, 3)
    for number, policy in enumerate(dict.fromkeys(one.policy for one in runs)):
        ordered = sorted((one for one in runs if one.policy == policy), key=lambda one: one.speed)
        speeds, colour = [one.speed for one in ordered], f"C{number}"
        look: dict[str, Any] = {"color": colour, "marker": _MARKERS[number % len(_MARKERS)], "markersize": 5}
        share.plot(speeds, [100 * one.attainment for one in ordered], label=policy, **look)
        goodput.plot(speeds, [one.goodput for one in ordered], label=policy, **look)
        for name, style in _STYLES.items():
            times = [getattr(one, name) for one in ordered]
            label = f"{policy} {name[-3:]}" if name == "ttft_p90" else None
            ttft.plot(speeds, times, style, label=label, **look)
    share.axhline(90, color="black", linewidth=1.2, label="90%: what a sustained rate must meet")
    ttft.axhline(slo_ttft_s, color="black", linewidth=1.2, label=f"objective: {slo_ttft_s:g} s")
    share.set_ylabel("requests that met both objectives, %")
    goodput.set_ylabel("of those, requests/s")
    ttft.set_ylabel("time to first token, s (p50 dotted, p90, p99 dashed)")
    ttft.set_yscale("log")
    for axes in (share, goodput, ttft):
        axes.set_xlabel("speed of the trace")
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    _save(figure, path, dpi=110)


def draw_fleets(found: Comparison, path: Path) -> None:
    """Draw the workers of each role over time: fixed, scaled, and switching."""
    figure = Figure(figsize=(16, 5), layout="constrained")
    FigureCanvasAgg(figure)
    prefill, decode, roles = figure.subplots(1, 3)
    for number, row in enumerate((found.fixed, found.load, found.slo)):
        _steps(prefill, row.summary.fleet, "prefill", f"C{number}", row.name)
        _steps(decode, row.summary.fleet, "decode", f"C{number}", row.name)
    _steps(roles, found.switch.summary.fleet, "prefill", "C3", "switch: prefill")
    _steps(roles, found.switch.summary.fleet, "decode", "C4", "switch: decode")
    for axes, title in ((prefill, "prefill workers"), (decode, "decode workers"), (roles, "workers")):
        axes.set_ylabel(title)
        axes.set_xlabel("seconds")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    _save(figure, path, dpi=80)


def _save(figure: Figure, path: Path, dpi: int) -> None:
    """Raises ConfigError for a file that cannot be written."""
    try:
        figure.savefig(path, format="png", dpi=dpi)
    except OSError as error:
        raise ConfigError("--png", f"cannot write {path}: {error.strerror}", "give another file") from None


def _steps(axes: Axes, fleet: Sequence[FleetSize], role: str, colour: str, label: str) -> None:
    times, counts = [size.at_s for size in fleet], [getattr(size, role) for size in fleet]
    axes.step(times, counts, where="post", color=colour, label=label)
