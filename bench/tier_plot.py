"""Draws bench.tier_curves. Imports matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FormatStrFormatter

from kvcache.tiers.config import PREFETCH_POLICIES, WRITE_POLICIES

_PREFETCHES = (*PREFETCH_POLICIES, "timeout, if faster")
_COLOURS = {name: f"C{number}" for number, name in enumerate((*WRITE_POLICIES, *_PREFETCHES))}
_MARKERS = dict(zip(_COLOURS, "os^vDPX", strict=True))
_SHADES = {"device": 1.0, "host": 0.55, "storage": 0.2}
_BAR = 0.26  # of the room between two ratios
_RATIO = "hicache_ratio (host pages for each device page)"
_Place = Literal["upper left", "upper right", "lower right"]
_READ = "time to read one page from storage, ms"


def draw(values: Mapping[str, Any], path: Path) -> None:
    """Draw the `values` of bench.tier_curves as PNG."""
    figure = Figure(figsize=(17, 9), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplot_mosaic([["found", "moved", "computed"], ["sources", "stored", "times"]])
    sizes, prefetch = values["sizes"], values["prefetch"]
    _found(panels["found"], values["trace"], sizes)
    _sources(panels["sources"], values["trace"], sizes)
    _moved(panels["moved"], sizes, {"to_host": "-", "to_device": "--"})
    panels["moved"].set_title("Pages moved between device and host")
    _moved(panels["stored"], sizes, {"to_storage": "-", "from_storage": "--"})
    panels["stored"].set_title("Pages moved between host and storage")
    _computed(panels["computed"], prefetch)
    _times(panels["times"], prefetch)
    for axes in panels.values():
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    figure.savefig(path, format="png", dpi=80)


# -- sizes -------------------------------------------------------------------------------------------


def _found(axes: Axes, trace: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    for policy, points in sizes.items():
        ratios = [0.0, *map(float, points)]
        shares = [trace["device"], *(point["host_alone"] for point in points.values())]
        axes.plot(ratios, [100 * share for share in shares], **_look(policy))
    axes.axhline(100 * trace["again"], color="black", linewidth=1.2)
    axes.set_title("Found on device and host (no storage)")
    axes.set_xlabel(_RATIO)
    axes.set_ylabel("prompt tokens found, %")
    axes.set_ylim(0, 118 * trace["again"])
    _legend(axes, WRITE_POLICIES, {"if the device had room for all": "-"}, "lower right")


def _sources(axes: Axes, trace: Mapping[str, Any], sizes: Mapping[str, Any]) -> None:
    """A bar for each ratio and policy, of three parts."""
    ratios = list(next(iter(sizes.values())))
    axes.bar([0], [100 * trace["device"]], _BAR, color="black")
    for number, (policy, points) in enumerate(sizes.items()):
        places = [1 + place + (number - 1) * _BAR for place in range(len(ratios))]
        below = [0.0] * len(ratios)
        for tier, shade in _SHADES.items():
            heights = [100 * points[ratio][tier] for ratio in ratios]
            axes.bar(places, heights, 0.9 * _BAR, below, color=_COLOURS[policy], alpha=shade)
            below = [low + height for low, height in zip(below, heights, strict=True)]
    axes.axhline(100 * trace["again"], color="black", linewidth=1.2)
    axes.set_xticks(range(1 + len(ratios)), ["0", *ratios])
    axes.set_title("Where it is found, with storage (bars: policies as above)")
    axes.set_xlabel(_RATIO)
    axes.set_ylabel("prompt tokens found, %")
    axes.set_ylim(0, 125 * trace["again"])
    parts = [Patch(color="black", alpha=shade, label=tier) for tier, shade in _SHADES.items()]
    axes.legend(handles=parts, fontsize="small", loc="upper left", ncols=3)


def _moved(axes: Axes, sizes: Mapping[str, Any], moves: Mapping[str, str]) -> None:
    highest = 0.0
    for policy, points in sizes.items():
        for move, style in moves.items():
            pages = [100 * point[move] for point in points.values()]
            axes.plot(list(map(float, points)), pages, style, **_look(policy))
            highest = max(highest, *pages)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.set_xlabel(_RATIO)
    axes.set_ylabel("pages moved for 100 pages of prompts")
    axes.set_ylim(0, 1.35 * highest)
    _legend(axes, WRITE_POLICIES, moves, "upper right")


# -- prefetch ----------------------------------------------------------------------------------------


def _computed(axes: Axes, prefetch: Mapping[str, Any]) -> None:
    for policy in _PREFETCHES:
        points = prefetch[policy]
        shares = [100 * point["computed"] for point in points.values()]
        axes.plot(list(map(float, points)), shares, **_look(policy))
    axes.set_title("Slow storage: computed although it is stored")
    axes.set_ylabel("prompt tokens computed, %")
    axes.set_ylim(-3, 105)
    _read_axis(axes, prefetch)
    _legend(axes, _PREFETCHES, {_compute_label(prefetch): ":"}, "upper left")


def _times(axes: Axes, prefetch: Mapping[str, Any]) -> None:
    for policy in _PREFETCHES:
        points = prefetch[policy]
        for name, style in (("ttft_s", "-"), ("queue_s", "--")):
            times = [point[name] for point in points.values()]
            axes.plot(list(map(float, points)), times, style, **_look(policy))
    axes.set_title("Slow storage: how long requests wait")
    axes.set_ylabel("mean of the requests, s")
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(FormatStrFormatter("%g"))
    _read_axis(axes, prefetch)
    lines = {"time to first token": "-", "time in the queue": "--", _compute_label(prefetch): ":"}
    _legend(axes, _PREFETCHES, lines, "upper left")


def _read_axis(axes: Axes, prefetch: Mapping[str, Any]) -> None:
    axes.axvline(prefetch["page_compute_ms"], color="black", linestyle=":", linewidth=1.2)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(FormatStrFormatter("%g"))
    axes.set_xlabel(_READ)


def _compute_label(prefetch: Mapping[str, Any]) -> str:
    return f"computing one page: {prefetch['page_compute_ms']:.1f} ms"


# -- looks -------------------------------------------------------------------------------------------


def _look(policy: str) -> dict[str, Any]:
    return {"color": _COLOURS[policy], "marker": _MARKERS[policy], "markersize": 5, "alpha": 0.85}


def _legend(axes: Axes, policies: Sequence[str], lines: Mapping[str, str], place: _Place) -> None:
    """Colours are policies, and styles are what `lines` says of them."""
    for policy in policies:
        axes.plot([], [], label=policy, **_look(policy))
    for name, style in lines.items():
        axes.plot([], [], color="black", linestyle=style, label=name)
    axes.legend(fontsize="small", loc=place)
