"""The figures of `baton bench`: as a table, as JSON, as curves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from rich.table import Table

from cluster.load.api_client import TimedAnswer
from cluster.load.run import Measured
from common.errors import ConfigError

SHARES = (0.5, 0.9, 0.99)
_ABOUT = {
    "ttft": "time to first token",
    "itl": "time between pieces of an answer",
    "tpot": "time per output token after the first",
    "e2e": "whole request",
}


@dataclass(frozen=True)
class Figures:
    """Of one run. `percentiles` are seconds by name, in the order of SHARES; none if nothing was measured."""

    name: str
    requests: int
    failures: dict[str, int]
    seconds: float
    requests_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    output_tokens_s: float
    percentiles: dict[str, list[float]]


def times(answer: TimedAnswer) -> dict[str, list[float]]:
    """The times of one answer by name, as vLLM's and guidellm's benchmarks define them."""
    pieces = answer.piece_times
    if not pieces:  # nothing but control tokens
        return {"ttft": [], "itl": [], "tpot": [], "e2e": [answer.ended_at - answer.sent_at]}
    tokens = answer.output_tokens
    return {
        "ttft": [pieces[0] - answer.sent_at],
        "itl": [later - earlier for earlier, later in pairwise(pieces)],
        "tpot": [(pieces[-1] - pieces[0]) / (tokens - 1)] if tokens > 1 else [],
        "e2e": [answer.ended_at - answer.sent_at],
    }


def all_times(measured: Measured) -> dict[str, list[float]]:
    """Those of all answers."""
    each = [times(answer) for answer in measured.answers]
    return {name: [value for one in each for value in one[name]] for name in _ABOUT}


def figures(measured: Measured) -> Figures:
    """The figures of one run."""
    answers, found = measured.answers, all_times(measured)
    output = sum(answer.output_tokens for answer in answers)
    shares = {
        name: [float(value) for value in np.quantile(values, SHARES)] if values else []
        for name, values in found.items()
    }
    seconds = max(measured.seconds, 1e-9)
    return Figures(
        name=measured.name,
        requests=len(answers),
        failures=dict(Counter(measured.failures)),
        seconds=measured.seconds,
        requests_s=len(answers) / seconds,
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        cached_tokens=sum(answer.cached_tokens for answer in answers),
        output_tokens=output,
        output_tokens_s=output / seconds,
        percentiles=shares,
    )


def table(runs: Sequence[Figures]) -> Table:
    """A column for each run."""
    shown = Table(box=None, padding=(0, 3, 0, 0), header_style="bold")
    shown.add_column("")
    for run in runs:
        shown.add_column(run.name, justify="right")
    rows: list[tuple[str, list[str]]] = [
        ("requests answered", [f"{run.requests:,}" for run in runs]),
        ("requests failed", [f"{sum(run.failures.values()):,}" for run in runs]),
        ("seconds", [f"{run.seconds:.2f}" for run in runs]),
        ("requests per second", [f"{run.requests_s:.2f}" for run in runs]),
        ("output tokens per second", [f"{run.output_tokens_s:,.1f}" for run in runs]),
        ("prompt tokens", [f"{run.prompt_tokens:,}" for run in runs]),
        ("  of them cached", [f"{run.cached_tokens:,}" for run in runs]),
        ("output tokens", [f"{run.output_tokens:,}" for run in runs]),
    ]
    for name, about in _ABOUT.items():
        for i, share in enumerate(SHARES):
            cells = [_milliseconds(run.percentiles[name], i) for run in runs]
            rows.append((f"{about}, p{100 * share:g}" if i == 0 else f"  p{100 * share:g}", cells))
    for label, cells in rows:
        shown.add_row(label, *cells)
    return shown


def draw(runs: Sequence[Measured], path: Path) -> None:
    """A PNG: for each time, the share of what took at most so long, a curve for each run.

    Raises ConfigError without matplotlib.
    """
    try:
        from matplotlib.figure import Figure  # the extra `plot`
    except ImportError:
        raise ConfigError("--png", "matplotlib is not installed", "pip install 'baton-serve[plot]'") from None
    picture = Figure(figsize=(11, 7), layout="constrained")
    for axes, name in zip(picture.subplots(2, 2).flat, _ABOUT, strict=True):
        for style, run in zip(("-", "--", "-.", ":") * len(runs), runs, strict=False):
            values = sorted(all_times(run)[name])
            share = [(i + 1) / len(values) for i in range(len(values))]
            axes.plot([1000 * value for value in values], share, style, label=run.name)
        axes.set_xlabel(f"{_ABOUT[name]}, ms")
        axes.set_ylabel("share of those that took at most this")
        axes.set_xscale("log")
        axes.grid(alpha=0.3)
        axes.legend()
    try:
        picture.savefig(path, dpi=120)
    except (OSError, ValueError) as error:
        raise ConfigError("--png", f"cannot write {path}: {error}", "give another file") from None


def _milliseconds(shares: list[float], i: int) -> str:
    return f"{1000 * shares[i]:,.1f} ms" if shares else "-"
