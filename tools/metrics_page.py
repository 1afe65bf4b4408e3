"""`python -m tools.metrics_page`: write docs/metrics.md from the metrics that a router has."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from pathlib import Path

from prometheus_client.core import Metric

from router.options import RouterOptions
from router.service import Router
from router.vllm_metrics import ALIASES, Alias

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "metrics.md"
_BEGIN, _END = "<!-- metrics: python -m tools.metrics_page -->", "<!-- end of metrics -->"


def metrics() -> dict[str, Metric]:
    """All metrics of a router, by name without suffixes."""

    async def collect() -> list[Metric]:
        model = ROOT / "deploy" / "demo_model"
        router = Router(RouterOptions(model=model, served_model_name="demo"))
        try:
            return list(router.registry.collect())
        finally:
            router.close()

    return {metric.name: metric for metric in asyncio.run(collect())}


def labels_of(metric: Metric) -> tuple[str, ...]:
    """The names of its labels; also of a metric without a series."""
    return tuple(metric._labelnames)  # type: ignore[attr-defined]


def with_tables(page: str, found: dict[str, Metric]) -> str:
    """A page with these tables in their place."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    sections = [
        f"## {title}\n\n{_table(metric for name, metric in sorted(found.items()) if name.startswith(prefix))}"
        for title, prefix in (("Of the router", "baton_router_"), ("Of each worker", "baton_worker_"))
    ]
    aliases = "".join(f"| `vllm:{one.name}` | {_source(one)} |\n" for one in ALIASES)
    sections.append(f"## vLLM's names\n\n| with `--metrics-compat vllm` | is |\n|---|---|\n{aliases}")
    return f"{before}{_BEGIN}\n\n{chr(10).join(sections)}\n{_END}{after}"


def _source(alias: Alias) -> str:
    only = f", `{alias.only[0]}` is `{alias.only[1]}`" if alias.only else ""
    return f"`baton_{alias.of}`{only}"


def _table(found: Iterable[Metric]) -> str:
    rows = []
    for metric in found:
        name = f"{metric.name}_total" if metric.type == "counter" else metric.name
        labels = ", ".join(f"`{label}`" for label in labels_of(metric))
        rows.append(f"| `{name}` | {metric.type} | {labels} | {metric.documentation} |\n")
    return "| metric | type | labels | what it is |\n|---|---|---|---|\n" + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text(), metrics()))
