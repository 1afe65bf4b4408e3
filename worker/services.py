"""Services: the parts of a worker that its role uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from kvcache.memory import Memory
from scheduler.node_policy import NodePolicy
from scheduler.scheduler import Scheduler
from wire.mailbox import Mailbox
from wire.retransmitter import Retransmitter
from worker.options import WorkerOptions
from worker.outbox import Outbox
from worker.questions import Questions
from worker.rooms import Rooms
from worker.transfer import PoolTransport


@dataclass(frozen=True, slots=True)
class Services:
    """All of them live as long as the worker."""

    worker_id: str
    options: WorkerOptions
    memory: Memory
    transfer: PoolTransport
    mailbox: Mailbox
    retransmitter: Retransmitter
    questions: Questions
    outbox: Outbox
    rooms: Rooms[Any]
    build_scheduler: Callable[[NodePolicy], Scheduler]  # over this worker's engine and memory
