"""Draws the curves of a sweep. The only module that imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FormatStrFormatter

from simulator.summary import Summary

_STYLES = {"ttft_p50": ":", "ttft_p90": "-", "ttft_p99": "--"}


def draw(runs: Sequence[Summary], slo_ttft_s: float, path: Path) -> None:
    """Draw attainment, goodput and time to first token over the speed, in a colour per policy."""
    figure = Figure(figsize=(16, 5), layout="constrained")
    FigureCanvasAgg(figure)
    share, goodput, ttft = figure.subplots(1, 3)
    for number, policy in enumerate(dict.fromkeys(one.policy for one in runs)):
        ordered = sorted((one for one in runs if one.policy == policy), key=lambda one: one.speed)
        speeds, colour = [one.speed for one in ordered], f"C{number}"
        share.plot(speeds, [100 * one.attainment for one in ordered], ".-", color=colour, label=policy)
        goodput.plot(speeds, [one.goodput for one in ordered], ".-", color=colour, label=policy)
        for name, style in _STYLES.items():
            times = [getattr(one, name) for one in ordered]
            label = f"{policy} {name[-3:]}" if name == "ttft_p90" else None
            ttft.plot(speeds, times, style, color=colour, label=label)
    share.axhline(90, color="grey", linewidth=0.8)
    ttft.axhline(slo_ttft_s, color="grey", linewidth=0.8)
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
    figure.savefig(path, format="png", dpi=110)
