"""What a machine that plays scheduler knows of its requests, and of the KV that their forwards wrote."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence

from kvcache.memory import GroupPages, Memory
from kvcache.radix_key import Namespace
from tests.kvcache.support import Request
from wire.request import NOBODY

Seen = tuple[str, Namespace, tuple[int, ...]]  # tenant, namespace, tokens
FINAL = "!"  # behind the tenant: it was private for ever when it was computed


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

    def __init__(self, built: Memory, listed: Sequence[list[int]] = ()) -> None:
        """`listed`: what the operator says is public."""
        self.memory = built
        self.listed = [tuple(one) for one in listed]
        self.owners: dict[tuple[Namespace, tuple[int, ...]], set[str]] = {}
        self.kv: MutableMapping[int, Seen] = {}
        self.window: MutableMapping[tuple[int, int], Seen] = {}
        self.state: MutableMapping[int, Seen] = {}

    def prefix(self, req: Request, length: int) -> Seen:
        return self.owner(req, length), req.namespace, tuple(req.fill_ids[:length].tolist())

    def owner(self, req: Request, length: int) -> str:
        """Whose the last of these tokens is."""
        size, bigram, private_from = self.memory.page_size, req.namespace.is_bigram, req.marks.private_from
        if private_from is None:
            return req.tenant
        if (length - 1) // size >= max(private_from, (req.marks.public - bigram) // size):
            return req.tenant + FINAL
        return "" if req.tenant.startswith(NOBODY) else req.tenant

    def wrote(self, req: Request, length: int) -> Seen:
        """The tenant has computed this, which counts where tenants share."""
        seen = self.prefix(req, length)
        if not seen[0].endswith(FINAL):
            self.owners.setdefault(seen[1:], set()).add(seen[0])
        return seen

    def may_use(self, found: Seen, wanted: Seen) -> bool:
        """Whether these are the same tokens, written for this tenant, or named by the operator: or, where
        tenants share, written for everybody, or by as many tenants as make them public."""
        if found[1:] != wanted[1:]:
            return False
        if found[0].removesuffix(FINAL) == wanted[0].removesuffix(FINAL):
            return True
        if any(found[2] == one[: len(found[2])] for one in self.listed):
            return True
        if found[0].endswith(FINAL):
            return False
        owners, users = self.owners.get(found[1:], set()), self.memory.config.tenancy.users
        return users > 0 and ("" in owners or len(owners) >= users)

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
