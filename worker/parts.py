"""WorkerParts: what a worker is made of, opened in one order and closed in the reverse one.

The model and its memory are opened first. A worker that changes its role (worker/switch.py) keeps them.
"""

from __future__ import annotations

import secrets
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from engine.batch import Engine
from kvcache.memory import Memory
from kvcache.publisher import EventPublisher
from scheduler.node_policy import NodePolicy
from scheduler.scheduler import Scheduler
from wire.mailbox import Mailbox
from wire.retransmitter import Retransmitter
from wire.security import Curve, curve_for
from worker.build import build_engine, build_scheduler, open_publisher
from worker.options import WorkerOptions
from worker.outbox import Outbox
from worker.questions import Questions
from worker.role import WorkerRole
from worker.rooms import Rooms
from worker.services import Services
from worker.transfer import PoolTransport


@dataclass(frozen=True, slots=True)
class ModelParts:
    """The weights, and the KV memory with its tree."""

    engine: Engine
    memory: Memory

    def close(self) -> None:
        """Free both. No scheduler may use them any more."""
        self.engine.close()
        self.memory.close()


def open_model(options: WorkerOptions, reserves: bool) -> ModelParts:
    """Load the model and allocate its pools. Raises ConfigError for options that cannot work."""
    return ModelParts(*build_engine(options, reserves))


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """The open parts of one worker. `owned` closes all of them, but not a model that the worker was given."""

    engine: Engine
    curve: Curve | None  # None in a cluster without a secret
    publisher: EventPublisher | None  # None when KV events are off
    services: Services
    role: WorkerRole[Any]
    owned: ExitStack


def open_parts(
    options: WorkerOptions, kind: type[WorkerRole[Any]], kept: ModelParts | None = None
) -> WorkerParts:
    """Load the model, or use the one that was kept, and bind the sockets. Raises ConfigError for options that
    cannot work; what was open by then is closed again."""
    with ExitStack() as owned:
        model = kept
        if model is None:
            model = open_model(options, kind.reserves)
            owned.callback(model.close)
        engine, memory = model.engine, model.memory
        curve = curve_for(options.secret())
        mailbox = Mailbox(options.interface, curve, ports=options.ports.of("mailboxes"))
        owned.callback(mailbox.close)
        if memory.tiers is not None:
            memory.tiers.on_done(mailbox.nudge)
            owned.callback(memory.tiers.on_done, _nobody)  # the memory may outlive this role
        transfer = PoolTransport(options, memory, engine.spec.fingerprint)
        owned.callback(transfer.close)
        publisher = open_publisher(options, memory, curve, mailbox.nudge)
        if publisher is not None:
            owned.callback(publisher.close)

        def schedule(policy: NodePolicy) -> Scheduler:
            return build_scheduler(options, memory, engine, policy, kind.phases)

        worker_id = options.worker_id or f"{kind.name}-{secrets.token_hex(3)}"
        services = Services(
            worker_id=worker_id,
            options=options,
            memory=memory,
            transfer=transfer,
            mailbox=mailbox,
            retransmitter=Retransmitter(mailbox.send),
            questions=Questions(mailbox.send, options.hand_off_timeout_s),
            outbox=Outbox(worker_id, mailbox.send, options.output_lease_s),
            rooms=Rooms(2 * options.hand_off_timeout_s, options.hand_off_timeout_s),
            build_scheduler=schedule,
        )
        role = kind(services)
        owned.callback(role.scheduler.close)
        owned.callback(role.lending.close)
        owned.callback(role.close)
        return WorkerParts(engine, curve, publisher, services, role, owned.pop_all())


def _nobody() -> None:
    """Who is woken while no worker uses the memory."""
