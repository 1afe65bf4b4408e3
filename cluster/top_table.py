"""The frame of `baton top`: figures as tables of rich."""

from __future__ import annotations

from rich.console import Group
from rich.table import Table

from router.dashboard.figures import FleetFigures, Snapshot, fleet_figures, in_order, kv_use
from router.placement.transfer_rates import machine
from wire.records import Role, WorkerRecord

_HOST_CHARACTERS = 8  # of a boot id: enough to tell hosts apart
_FULL = 0.9


def frame(now: Snapshot, before: Snapshot | None) -> Group:
    """Everything, for the time between two snapshots; without `before`, since the routers' start."""
    return Group(_summary(now, fleet_figures(now, before), before), _workers(now.workers))


def _summary(now: Snapshot, fleet: FleetFigures, before: Snapshot | None) -> Table:
    table = Table.grid(padding=(0, 3))
    table.add_column(style="bold")
    roles = [one.role for one in now.workers]
    models = ", ".join(sorted({one.model for one in now.workers})) or "no worker"
    routers = f"{len(now.routers)} answer" + (f", [red]{len(now.silent)} silent[/]" if now.silent else "")
    since = "since the start" if before is None else f"last {now.at - before.at:.0f} s"
    errors = [f"{count:.0f} x {status}" for status, count in sorted(fleet.statuses.items())]
    near = [f"{name} {_rate(speed)}" for name, speed in sorted(fleet.transfers.items())]
    sources = [f"{share:.0%} from {name}" for name, share in fleet.cached_from.items()]
    rows = {
        "model": models,
        "routers": routers,
        "workers": f"{roles.count(Role.PREFILL)} prefill, {roles.count(Role.DECODE)} decode"
        + (f", [red]{fleet.suspected:.0f} suspected[/]" if fleet.suspected else ""),
        "rooms": f"{fleet.rooms:.0f} run, {fleet.queued:.0f} wait in routers",
        "figures": since,
        "requests": _per_second(fleet.requests_s),
        "output": _per_second(fleet.output_tokens_s, "tokens"),
        "hit rate": "-" if fleet.hit_rate is None else "  ".join([f"{fleet.hit_rate:.1%}", *sources]),
        "TTFT p50 p95 p99": " ".join(map(_seconds, fleet.ttft_s)),
        "ITL p50 p95 p99": " ".join(map(_seconds, fleet.itl_s)),
        "transfer": "  ".join([_rate(fleet.transfer_bytes_s), *near]),
        "errors": "  ".join([*errors, f"{fleet.restarts:.0f} restarts"]),
    }
    for name, text in rows.items():
        table.add_row(name, text)
    return table


def _workers(workers: list[WorkerRecord]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in ("worker", "role", "host", "rack"):
        table.add_column(name)
    for name in ("queued tokens", "running", "waiting", "KV", "prefill/s", "step"):
        table.add_column(name, justify="right")
    for one in in_order(workers):
        load, used = one.load, kv_use(one)
        table.add_row(
            one.id,
            f"{one.role}{' (drains)' if one.draining else ''}",
            machine(one.host)[:_HOST_CHARACTERS],
            one.rack,
            f"{load.queued_prefill_tokens:,}",
            f"{load.running_requests}/{one.max_running_requests}",
            str(load.waiting_requests),
            f"[{'red' if used > _FULL else 'default'}]{used:.0%}[/]",
            f"{load.prefill_tokens_per_s:,.0f}" if load.prefill_tokens_per_s else "-",
            _seconds(load.decode_step_s or None),
        )
    return table


def _seconds(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}s" if value >= 1 else f"{1000 * value:.1f}ms"


def _per_second(value: float | None, unit: str = "") -> str:
    return "-" if value is None else f"{value:,.1f} {unit}/s".replace(" /", "/")


def _rate(bytes_per_s: float | None) -> str:
    return "-" if bytes_per_s is None else f"{bytes_per_s / 1e9:.3g} GB/s"
