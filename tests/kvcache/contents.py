"""What a machine that plays scheduler knows of its requests, and of the KV that their forwards wrote."""

from __future__ import annotations

from collections.abc import MutableMapping

from kvcache.memory import GroupPages, Memory
from kvcache.radix_key import Namespace
from tests.kvcache.support import Request

Seen = tuple[str, Namespace, tuple[int, ...]]  # tenant, namespace, tokens


class Live:
    """A request and what of it is under way."""

    def __init__(self, req: Request) -> None:
        self.req = req
        self.prompt_len = len(req.fill_ids)
        self.scheduled_len = 0
        self.out: list[int] = []  # ends of launched forwards that have not landed
        self.reserved: GroupPages | None = None  # what a transfer must bring
        self.deferred: list[GroupPages] = []  # freed while a forward was out


class Contents:
    """What was last written to every slot of every group, and what forwards must find there."""

    def __init__(self, built: Memory) -> None:
        self.memory = built
        self.owners: dict[tuple[Namespace, tuple[int, ...]], set[str]] = {}
        self.kv: MutableMapping[int, Seen] = {}
        self.window: MutableMapping[tuple[int, int], Seen] = {}
        self.state: MutableMapping[int, Seen] = {}

    def prefix(self, req: Request, length: int) -> Seen:
        return req.tenant, req.namespace, tuple(req.fill_ids[:length].tolist())

    def wrote(self, req: Request, length: int) -> Seen:
        """The tenant has computed this, which counts where tenants share."""
        seen = self.prefix(req, length)
        self.owners.setdefault(seen[1:], set()).add(req.tenant)
        return seen

    def may_use(self, found: Seen, wanted: Seen) -> bool:
        """Whether these are the same tokens, written for this tenant: or, where tenants share, for everybody,
        or by as many tenants as make them public."""
        if found[1:] != wanted[1:]:
            return False
        owners, users = self.owners.get(found[1:], set()), self.memory.config.tenancy.users
        return found[0] == wanted[0] or (users > 0 and ("" in owners or len(owners) >= users))

    def write(self, req: Request, start: int, end: int) -> None:
        """Positions [start, end) get their KV, where the request has a place for it."""
        built, row = self.memory, req.req_pool_idx
        size = built.page_size
        for position in range(start, end):
            seen = self.wrote(req, position + 1)
            self.kv[int(built.req_to_token_pool.req_to_token[row, position])] = seen
            if built.swa is not None and position // size >= built.swa.private_from[row]:
                page = int(built.swa.table[row, position // size])
                assert page, "a forward writes to a window page that the request lacks"
                self.window[page, position % size] = seen

    def read(self, req: Request, start: int) -> None:
        """What a forward reads whose first query is at `start`."""
        built, row = self.memory, req.req_pool_idx
        size = built.page_size
        for position in range(start):
            slot = int(built.req_to_token_pool.req_to_token[row, position])
            assert self.may_use(self.kv[slot], self.prefix(req, position + 1))
        if built.swa is not None:
            for position in range(max(0, start - built.swa.window + 1), start):
                page = int(built.swa.table[row, position // size])
                assert self.may_use(self.window[page, position % size], self.prefix(req, position + 1))
