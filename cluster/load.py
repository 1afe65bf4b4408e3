"""One figure for how busy a worker is, from the load report it sends to the directory."""

from __future__ import annotations

from wire.records import Role, WorkerLoad, WorkerRecord


def load_share(record: WorkerRecord, prefill_tokens_per_worker: int) -> float:
    """The share of a worker's capacity in use: 0 idle, 1 full, above 1 requests wait.

    Prefill is bound by computation: its load is the queue over `prefill_tokens_per_worker`, the queue that
    one worker should have. Decode is bound by memory or by rows: its load is the larger share of the two.
    """
    load = record.load
    if record.role is Role.PREFILL:
        return load.queued_prefill_tokens / prefill_tokens_per_worker
    return max(_rows(load, record.max_running_requests), _memory(load, record.total_tokens))


def _rows(load: WorkerLoad, max_running_requests: int) -> float:
    return (load.running_requests + load.waiting_requests) / max_running_requests


def _memory(load: WorkerLoad, total_tokens: int) -> float:
    return 1.0 - min(load.free_tokens, total_tokens) / total_tokens
