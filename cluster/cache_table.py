"""The tables of `baton cache`: a row for each tier of each worker, and for each visibility."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass

from rich.table import Table

from kvcache.tenancy.report import SharingReport
from kvcache.tenancy.usage import Usage
from router.dashboard.figures import in_order
from wire.messages.caches import CacheSource
from wire.records import GroupPages, MovedPages, WorkerRecord

_NONE = MovedPages()
_FAILED = ("failed", "late")  # fetches that were given up


@dataclass(frozen=True)
class TierRow:
    """One tier of one worker; "peer" is what it has copied of other workers' caches (read), they of its
    own (written). Pages are those of the primary group, bytes those of all groups; None: not known."""

    worker: str
    tier: str
    pages: int | None
    total_pages: int | None
    bytes: int
    prompt_share: float | None  # of the tokens of prompts since the worker's role began; found here first
    written_bytes: int
    read_bytes: int
    failed: int  # moves to and from the tier below the device
    queued: int  # likewise


def tier_rows(workers: list[WorkerRecord]) -> list[TierRow]:
    """Prefill workers first; of each worker the device first."""
    return [row for worker in in_order(workers) for row in _rows(worker)]


def _rows(worker: WorkerRecord) -> Iterator[TierRow]:
    figures, moves = worker.figures, worker.figures.moves
    to_host, to_device = moves.get("to_host", _NONE), moves.get("to_device", _NONE)
    to_peer = moves.get("to_peer", _NONE)
    yield TierRow(
        worker.id, "device", *_primary(worker, figures.groups), _held_bytes(worker, figures.groups),
        _share(worker, "device"), to_device.bytes, to_host.bytes, 0, 0,
    )  # fmt: skip
    if figures.host:
        yield TierRow(
            worker.id, "host", *_primary(worker, figures.host), _held_bytes(worker, figures.host),
            _share(worker, "host"), to_host.bytes, to_device.bytes + to_peer.bytes,
            to_host.failed + to_device.failed + to_peer.failed,
            to_host.queued + to_device.queued + to_peer.queued,
        )  # fmt: skip
    if "to_storage" in moves:
        to, back = moves["to_storage"], moves.get("from_storage", _NONE)
        yield TierRow(
            worker.id, "storage", None, None, figures.storage_bytes,
            _share(worker, "storage"), to.bytes, back.bytes,
            to.failed + back.failed, to.queued + back.queued,
        )  # fmt: skip
    if figures.fetches:
        failed = sum(count for outcome, count in figures.fetches.items() if outcome in _FAILED)
        yield TierRow(
            worker.id, "peer", None, None, 0, _share(worker, "peer"),
            figures.lent_bytes, figures.fetched_bytes, failed, 0,
        )  # fmt: skip


def _primary(worker: WorkerRecord, groups: Mapping[str, GroupPages]) -> tuple[int | None, int | None]:
    """Pages in use or cached, of how many."""
    of = groups.get(worker.groups[0].name) if worker.groups else None
    return (None, None) if of is None else (max(of.total - of.free, 0), of.total)


def _held_bytes(worker: WorkerRecord, groups: Mapping[str, GroupPages]) -> int:
    sizes = {layout.name: layout.page_bytes for layout in worker.groups}
    return sum(max(of.total - of.free, 0) * sizes.get(name, 0) for name, of in groups.items())


def _share(worker: WorkerRecord, source: CacheSource) -> float | None:
    """Of the tokens of all prompts."""
    prompts, figures = worker.figures.prompt_tokens, worker.figures
    return figures.cached_from.get(source, 0) / prompts if prompts else None


def row_objects(rows: list[TierRow]) -> list[dict[str, object]]:
    """For a program."""
    return [asdict(row) for row in rows]


def cache_table(rows: list[TierRow]) -> Table:
    """For a person."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("worker")
    table.add_column("tier")
    for name in ("pages", "full", "GB", "of prompts", "GB written", "GB read", "failed", "queue"):
        table.add_column(name, justify="right")
    for row in rows:
        known = row.pages is not None and row.total_pages is not None
        table.add_row(
            row.worker,
            row.tier,
            f"{row.pages:,}/{row.total_pages:,}" if known else "-",
            f"{(row.pages or 0) / max(1, row.total_pages or 0):.0%}" if known else "-",
            _gigabytes(row.bytes),
            "-" if row.prompt_share is None else f"{row.prompt_share:.1%}",
            _gigabytes(row.written_bytes),
            _gigabytes(row.read_bytes),
            str(row.failed),
            str(row.queued),
        )
    return table


def sharing_table(reports: Mapping[str, SharingReport]) -> Table:
    """What each worker has cached, by visibility, for a person."""
    columns = ("nodes", "tokens", *Usage._fields)
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("worker")
    table.add_column("visibility")
    for name in columns:
        table.add_column(name, justify="right")
    for worker, report in reports.items():
        for visibility, sums in report.visibilities.items():
            table.add_row(worker, visibility, *(f"{sums[name]:,}" for name in columns))
    return table


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:.3g}"
