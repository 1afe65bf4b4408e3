"""The reports that a worker gives of itself, for `Inspect` messages."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import msgspec

from kvcache.memory import Memory
from kvcache.report import node_reports, pretty_print
from kvcache.tenancy.report import sharing_report
from kvcache.tiers.report import tier_report
from scheduler.scheduler import Scheduler
from worker.rooms import Rooms


def worker_report(what: str, memory: Memory, scheduler: Scheduler, rooms: Rooms[Any]) -> str:
    """The report that `what` names, as JSON; the tree as text. An unknown name is answered with an error."""
    match what:
        case "memory":
            return json.dumps(asdict(scheduler.check_memory()))
        case "tree":
            return pretty_print(memory.cache.tree, memory.promotion)
        case "nodes":
            return json.dumps(node_reports(memory.cache.tree, memory.promotion))
        case "load":
            return msgspec.json.encode(scheduler.load()).decode()
        case "metrics":
            return json.dumps(scheduler.metrics.report())
        case "sharing":
            return json.dumps(asdict(sharing_report(memory.cache.tree, memory.promotion)))
        case "tiers":
            return json.dumps(tier_report(memory.tiers))
        case "rooms":
            return json.dumps([[room.room, room.epoch] for room in rooms.active()])
        case _:
            known = "memory, tree, nodes, load, metrics, sharing, tiers, rooms or leases"
            return json.dumps({"error": f"unknown report {what!r}: use {known}"})
