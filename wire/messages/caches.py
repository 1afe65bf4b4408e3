"""Between a router and a worker: what the worker holds, and what it is to forget."""

from __future__ import annotations

from typing import Literal

import msgspec

from wire.messages.base import Message
from wire.numbers import Natural
from wire.settings import TenantGeneration


class Inspect(Message, frozen=True, tag="inspect"):
    """Ask a worker for a report: "memory", "tree" (text), "nodes" (the tree for a program), "load", "metrics"
    or "rooms". `token` is echoed."""

    what: str
    token: Natural


class Inspected(Message, frozen=True, tag="inspected"):
    """The report, as JSON (the tree: text)."""

    token: Natural
    body: str


CacheTier = Literal["device", "host", "storage"]

CacheSource = Literal["device", "host", "storage", "peer"]
"""Where a worker has cached tokens of a prompt from; a peer is another worker."""


class ClearCache(Message, frozen=True, tag="clear_cache"):
    """Router -> worker: forget what is cached in these tiers and not in use. Answered with CacheCleared, once
    all are clear; a repeat, which has the same `token`, with the same answer."""

    tiers: list[CacheTier]
    token: Natural


class CacheCleared(Message, frozen=True, tag="cache_cleared", omit_defaults=True):
    """What a worker has forgotten, by tier; tiers that it does not have are left out. Of device and host
    these are pages of the primary group, of storage the blobs that it said it held, of all who share it.

    `problem` is why a tier is not clear.
    """

    token: Natural
    freed: dict[CacheTier, Natural]
    problem: str = ""


class ForgetTenant(Message, frozen=True, tag="forget_tenant"):
    """Router -> worker: the tenant is in this generation now, and what it cached in older ones is to be
    removed. Answered with TenantForgotten, in seconds; a repeat, which has the same `token`, with the same
    answer."""

    tenant: str
    generation: TenantGeneration
    token: Natural


class TierRemoval(msgspec.Struct, frozen=True):
    """What a worker has removed from a tier: pages of the primary group (of storage blobs), and bytes of all
    groups."""

    pages: Natural = 0
    bytes: Natural = 0


class TenantForgotten(Message, frozen=True, tag="tenant_forgotten", omit_defaults=True):
    """What a worker has removed of a tenant; tiers that it does not have are left out.

    `locked_pages` are in use, by streams that began before or by moves between tiers: they go when these end.
    `unfinished` are the tiers where it goes on. `problem` is why a tier keeps what it has.
    """

    token: Natural
    nodes: Natural
    removed: dict[CacheTier, TierRemoval]
    locked_pages: Natural = 0
    unfinished: list[CacheTier] = []
    problem: str = ""
