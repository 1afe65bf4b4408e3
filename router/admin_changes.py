"""AdminChanges: what an operator changes at a running router, through the admin listener (docs/doors.md)."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import get_args

from common.errors import InvalidRequest
from router.membership import Membership
from router.model import Model
from router.options import MOST_WEIGHT
from router.page import Page, forgotten_tenant, json_page
from router.process_group import ProcessGroup
from router.streams.inspections import Inspections
from wire.messages.caches import CacheTier, TenantForgotten

_CLEAR_TIMEOUT_S = 8.0  # shorter than `baton cache clear` waits
_FORGET_TIMEOUT_S = 8.0  # longer than a worker takes to answer, shorter than `baton forget` waits
_LONGEST_TENANT = 256
_TELL_TIMEOUT_S = 10.0  # longer than a directory that was started again needs to settle
_TIERS: tuple[CacheTier, ...] = get_args(CacheTier)
_Query = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class AdminChanges:
    """The changes that one router process takes, for all processes and routers that they concern."""

    model: Callable[[str | None], Model]  # by its name in the API; None: the only one
    names: tuple[str, ...]  # of the models
    membership: Membership
    processes: ProcessGroup
    inspections: Inspections

    async def make(self, path: str, query: _Query) -> Page:
        """Make the change at a path. Raises BatonError."""
        tenant = forgotten_tenant(path)
        if tenant is not None:
            return await self._forget(tenant)
        changes: dict[str, Callable[[_Query], Awaitable[Page]]] = {
            "/admin/cache/clear": self._clear,
            "/admin/requests/abort": self._abort,
            "/admin/weights": self._weigh,
        }
        return await changes[path](query)

    async def weights(self, _: _Query) -> Page:
        """The weights of version names of each model, which all routers have, and those that were deployed.

        Every change has the next `revision`.
        """
        return json_page({"models": {name: self.membership.weights.current(name) for name in self.names}})

    async def _weigh(self, query: _Query) -> Page:
        """POST ?model=NAME&VERSION=WEIGHT...: divide the model's new streams by these weights of version
        names, at all routers. They replace those from before. Without weights: by capacity."""
        name = self.model(query.get("model")).name
        weights = {one: _weight(one, given) for one, given in query.items() if one != "model"}
        await self.membership.weights.say(name, weights, _TELL_TIMEOUT_S)
        return await self.weights(query)

    async def _abort(self, query: _Query) -> Page:
        """POST ?id=ID: end a request, in whichever process of this router it is. POST ?all=true: end all.

        Their clients get an error with the code `aborted`. The answer lists the ids of those that ran."""
        request_id, every = query.get("id"), query.get("all") == "true"
        if every == bool(request_id):
            raise InvalidRequest("the query has either the id of a request or all=true", "id")
        return json_page({"aborted": await self.processes.abort(request_id)})

    async def _clear(self, query: _Query) -> Page:
        """POST ?worker=ID&tier=device|host|storage|all: have one worker, or all, forget what is cached and
        not in use. What each has freed, by tier; `silent` are those that did not answer in time."""
        tier, given = query.get("tier", "all"), query.get("worker")
        if tier not in ("all", *_TIERS):
            raise InvalidRequest(f"{tier!r} is no tier: use {', '.join(_TIERS)} or all", "tier")
        tiers = [one for one in _TIERS if tier in (one, "all")]
        asked = self.membership.mailboxes(given)
        said = await asyncio.gather(
            *(self.inspections.clear(mailbox, tiers, _CLEAR_TIMEOUT_S) for mailbox in asked.values()),
            return_exceptions=True,
        )
        freed, problems, silent = {}, {}, []
        for worker, answer in zip(asked, said, strict=True):
            if isinstance(answer, TimeoutError):
                silent.append(worker)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                freed[worker] = answer.freed
                if answer.problem:
                    problems[worker] = answer.problem
        return json_page({"freed": freed, "problems": problems, "silent": silent})

    async def _forget(self, tenant: str) -> Page:
        """POST: nothing that a tenant has cached so far is found again, by any later request. Then the
        workers remove it: what each has removed in the first seconds, by tier, and what is still in use;
        `silent` are those that did not answer in time, and `told` is false while other routers may not know
        of it. Pages that are public stay, also those that the tenant has computed, too."""
        if len(tenant) > _LONGEST_TENANT:
            raise InvalidRequest(f"a tenant's name has at most {_LONGEST_TENANT} characters", "tenant")
        generation = await self.membership.tenants.forget(tenant)
        asked = self.membership.mailboxes()
        told, *said = await asyncio.gather(
            self.membership.tenants.told(tenant, _FORGET_TIMEOUT_S),
            *(self.inspections.forget(to, tenant, generation, _FORGET_TIMEOUT_S) for to in asked.values()),
            return_exceptions=True,
        )
        workers, silent = {}, []
        for worker, answer in zip(asked, said, strict=True):
            if isinstance(answer, TenantForgotten):
                workers[worker] = {
                    "nodes": answer.nodes,
                    "removed": answer.removed,
                    "locked_pages": answer.locked_pages,
                    "unfinished": answer.unfinished,
                    "problem": answer.problem,
                }
            elif isinstance(answer, TimeoutError):
                silent.append(worker)
            elif isinstance(answer, BaseException):
                raise answer
        answer = {"tenant": tenant, "generation": generation.revision, "told": told is True}
        return json_page({**answer, "workers": workers, "silent": silent})


def _weight(version: str, given: str) -> float:
    try:
        weight = float(given)
    except ValueError:
        weight = math.nan
    if not 0 <= weight <= MOST_WEIGHT:
        raise InvalidRequest(
            f"the weight of version {version!r} is {given!r}, not a number from 0 to {MOST_WEIGHT:g}", version
        )
    return weight
