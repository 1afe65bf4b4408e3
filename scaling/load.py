"""What a worker reports for scaling, from the load report that it sends to the directory."""

from __future__ import annotations

from scaling.sample import WorkerSample
from wire.records import Role, WorkerLoad, WorkerRecord


def load_share(record: WorkerRecord, prefill_tokens_per_worker: int) -> float:
    """The share of a worker's capacity in use: 0 idle, 1 full, above 1 requests wait.

    Prefill is bound by computation: its load is the queue over `prefill_tokens_per_worker`, the queue that
    one worker should have. Decode is bound by memory or by rows: its load is the larger share of the two.
    Memory that is promised to the growth of its requests is in use: routers send a worker nothing when all
    of it is promised, although most of it may be free. Rooms that wait in routers would each take as much as
    a request that is here.
    """
    load = record.load
    if record.role is Role.PREFILL:
        return load.queued_prefill_tokens / prefill_tokens_per_worker
    rows = load.running_requests + load.waiting_requests
    in_use = max(rows / record.max_running_requests, _memory(load, record.total_tokens))
    return in_use * (1 + load.waiting_in_routers / max(1, rows))


def worker_sample(record: WorkerRecord) -> WorkerSample:
    """What a worker reports to ObjectiveScaler and RoleController, from its record."""
    load = record.load
    return WorkerSample(
        prompts=load.prompts,
        prefilled_tokens=load.prefilled_tokens,
        decoded_tokens=load.decoded_tokens,
        queued_tokens=load.queued_prefill_tokens,
        prefill_tokens_per_s=load.prefill_tokens_per_s,
        rows=load.running_requests,
        waiting=load.waiting_requests + load.waiting_in_routers,
        share=max(load.running_requests / record.max_running_requests, _memory(load, record.total_tokens)),
        step_s=load.decode_step_s,
        prefills=float(record.role is Role.PREFILL),
    )


def _memory(load: WorkerLoad, total_tokens: int) -> float:
    return 1.0 - min(load.headroom_tokens, total_tokens) / total_tokens
