"""Draws bench.tenancy. Imports matplotlib, which is optional."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

_MODES = {"separate": "nothing shared", "ours": "public pages shared", "shared": "all shared"}


def draw(values: Mapping[str, Any], path: Path) -> None:
    """Draw the `values` of bench.tenancy, with `curves`, as PNG."""
    figure = Figure(figsize=(14, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplot_mosaic([["curves", "hits", "times"]])
    for number, (epoch_s, points) in enumerate(values["curves"].items()):
        shares = [100 * share for share in points.values()]
        panels["curves"].plot(list(map(int, points)), shares, f"C{number}o-", label=f"epoch {epoch_s} s")
    panels["curves"].set_title("Hits on common texts")
    panels["curves"].set_xlabel("K (sharing_min_tenants)")
    panels["curves"].set_ylabel("% of those where all is shared")
    panels["curves"].legend()
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
