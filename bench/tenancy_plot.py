"""Draws bench.tenancy. Imports matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_MODES = {"separate": "nothing\nshared", "ours": "public\npages", "shared": "all\nshared"}


def _curves(axes: Axes, curves: Mapping[str, Mapping[str, float]]) -> None:
    """One for each name, over K."""
    for label, points in curves.items():
        axes.plot(list(map(int, points)), [100 * share for share in points.values()], "o-", label=label)
    axes.set_xlabel("K (sharing_min_tenants)")
    axes.set_ylabel("% of those where all is shared")
    axes.set_ylim(0, 105)
    axes.legend(fontsize="small")


def draw(values: Mapping[str, Any], path: Path) -> None:
    """Draw the `values` of bench.tenancy, with `curves`, as PNG."""
    figure = Figure(figsize=(17, 4.3), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplot_mosaic([["epochs", "pools", "hits", "times"]])
    _curves(panels["epochs"], {f"epoch {name} s": one for name, one in values["curves"]["epochs"].items()})
    panels["epochs"].set_title("Hits on common texts, by epoch")
    _curves(
        panels["pools"],
        {f"pool of {int(name) >> 10}k tokens": one for name, one in values["curves"]["pools"].items()},
    )
    panels["pools"].set_title("Hits on common texts, by pool")
    told, names = values["modes"], list(_MODES.values())
    hits = [100 * told[mode]["hit_tokens"] / told[mode]["prompt_tokens"] for mode in _MODES]
    panels["hits"].bar(names, hits, color=["C3", "C0", "C7"])
    panels["hits"].set_title("Prompt tokens from the cache")
    panels["hits"].set_ylabel("%")
    for number, (quantile, label) in enumerate((("ttft_p50", "median"), ("ttft_p95", "95th percentile"))):
        places = [place + 0.4 * number - 0.2 for place in range(len(_MODES))]
        panels["times"].bar(places, [told[mode][quantile] for mode in _MODES], 0.38, label=label)
    panels["times"].set_xticks(range(len(_MODES)), names)
    panels["times"].set_title("Time to the first token")
    panels["times"].set_ylabel("s")
    panels["times"].legend()
    for axes in panels.values():
        axes.grid(alpha=0.3)
        axes.set_axisbelow(True)
    figure.savefig(path, format="png", dpi=80)
