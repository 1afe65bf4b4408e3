"""AdminPages: a running router, from inside. Only the admin listener serves them (docs/doors.md).

What changes it is in admin_changes.py.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import parse_qsl, unquote, urlsplit

import msgspec

from common.errors import BatonError, InvalidRequest, Unavailable
from router.admin_changes import AdminChanges
from router.http_errors import error_body, to_http
from router.index.global_index import GlobalIndex
from router.index.page_table import Tier
from router.membership import Membership
from router.model import Model
from router.page import CHANGE, JSON, Page, json_page
from router.placement.models import Models, model_report
from router.placement.policy import RoleCandidates
from router.process_group import ProcessGroup
from router.streams.assignments import version_key
from router.streams.generation import Submission
from router.streams.inspections import Inspections
from wire.holds import HoldReport
from wire.messages.caches import CacheTier
from wire.request import SamplingParams

_INSPECT_TIMEOUT_S = 10.0
_LEASES_TIMEOUT_S = 3.0
_TRACE = "/debug/trace/"
_OF_INDEX: dict[CacheTier, Tier] = {"device": Tier.GPU, "host": Tier.CPU, "storage": Tier.STORAGE}
_Query = Mapping[str, str]


@dataclass(frozen=True, slots=True)
class AdminPages:
    """The pages of one router process. Those of which each process has a part are of all of them."""

    policy: str  # its name
    model: Callable[[str | None], Model]  # by its name in the API; None: the only one
    models: Models
    index: GlobalIndex
    unsure: Callable[[], list[str]]  # workers that may hold pages which the index lacks
    membership: Membership
    processes: ProcessGroup
    inspections: Inspections
    changes: AdminChanges

    async def open(self, target: str) -> Page:
        """The page at a path with its query string. What goes wrong is a page, too."""
        path, _, query = target.removeprefix(CHANGE).partition("?")
        path, given = unquote(path), dict(parse_qsl(query))
        try:
            is_change = target.startswith(CHANGE)
            return await (self.changes.make(path, given) if is_change else self._open(path, given))
        except BatonError as error:
            told = to_http(error)
            return json_page(told.body, told.status)

    async def _open(self, path: str, query: _Query) -> Page:
        pages: dict[str, Callable[[_Query], Awaitable[Page]]] = {
            "/metrics": self._metrics,
            "/admin/routers": self._routers,
            "/debug/workers": self._workers,
            "/debug/models": self._models,
            "/admin/weights": self.changes.weights,
            "/debug/suspicions": self._suspicions,
            "/debug/rooms": self._rooms,
            "/debug/requests": self._requests,
            "/debug/route": self._route,
            "/debug/leases": self._leases,
            "/debug/inspect": self._inspect,
            "/debug/index": self._index,
        }
        if path in pages:
            return await pages[path](query)
        if path.startswith(_TRACE):
            return await self._trace(path.removeprefix(_TRACE))
        return json_page(error_body(f"{path} does not exist here", "invalid_request_error"), 404)

    async def _metrics(self, _: _Query) -> Page:
        """For Prometheus: of all processes of this router."""
        found = await self.processes.metrics()
        return Page(200, "text/plain; version=0.0.4; charset=utf-8", found.decode())

    async def _routers(self, _: _Query) -> Page:
        """The admin listeners of all routers, as Prometheus discovers targets over HTTP."""
        found: dict[str, list[str]] = {"http": [], "https": []}
        for url in self.membership.admins:
            found[urlsplit(url).scheme].append(urlsplit(url).netloc)
        groups = [
            {"targets": targets, "labels": {"__scheme__": scheme}}
            for scheme, targets in found.items()
            if targets
        ]
        return json_page(groups)

    async def _trace(self, request_id: str) -> Page:
        """A request's timeline, for chrome://tracing or Perfetto."""
        found = await self.processes.trace(request_id)
        if found is None:
            return json_page(
                error_body(f"no trace of request {request_id!r} is kept", "invalid_request_error"), 404
            )
        return Page(200, JSON, found.decode())

    async def _workers(self, _: _Query) -> Page:
        """The directory's view, the load that this router and the others have assigned to each worker, and
        the workers that may hold pages of which this router's index does not know."""
        estimates = self.models.estimates()
        accounts = [{"id": one.record.id, "own": one.own, "peers": one.peers} for one in estimates]
        return json_page({"workers": self.membership.workers, "accounts": accounts, "unsure": self.unsure()})

    async def _models(self, _: _Query) -> Page:
        """The models and their versions, each with its share of new streams and its workers by role."""
        return json_page({"models": [model_report(one) for one in self.models.by_name.values()]})

    async def _suspicions(self, _: _Query) -> Page:
        """The last few hundred workers that each process did not believe to be alive.

        Each with the process, the cause, when the suspicion began and when it ended (null: it has not).
        `broken_pairs` are prefill and decode workers that did not get through to each other, as seen here;
        neither is suspected for that.
        """
        pairs = list(self.models.broken_pairs.history)
        rows = await self.processes.suspicions()
        return json_page({"suspicions": rows, "broken_pairs": pairs})

    async def _rooms(self, _: _Query) -> Page:
        """All rooms of this router, their workers, and what those said of silent rooms."""
        return json_page({"rooms": await self.processes.rooms()})

    async def _requests(self, _: _Query) -> Page:
        """The newest requests of this router, with their workers and times; /debug/trace/ID has the rest."""
        return json_page({"requests": await self.processes.requests()})

    async def _route(self, query: _Query) -> Page:
        """?prompt=...: which workers the policy would choose now, and what each would cost.

        The answer has a list of workers for each role. A cost is null for a worker that was not considered,
        and for a policy without costs. The query may also have model, extra_key, cache_salt, session and
        tenant.
        """
        if "prompt" not in query:
            raise InvalidRequest("the query has no prompt", "prompt")
        model = self.model(query.get("model"))
        prompt = model.tokenization.encode(query["prompt"])
        submission = Submission(
            request_id="", prompts=[prompt], sampling=SamplingParams(),
            extra_key=query.get("extra_key", ""), cache_salt=query.get("cache_salt", ""),
            session=query.get("session", ""), tenant=query.get("tenant", ""),
            marks=(model.public_prefixes.marks(prompt, None),),
        )  # fmt: skip
        version = model.versions.choose(version_key(submission))
        _, to_place = model.requests.make(submission, version.placer)[0]
        choice = version.placer.choose(to_place, time.monotonic())
        if choice is None:
            raise Unavailable("no decode worker is there")
        prediction = version.admission.predict(choice)
        costs = version.placer.costs(choice)
        return json_page(
            {
                "policy": self.policy,
                "model": model.name,
                "version": version.name,
                "fingerprint": version.fingerprint,
                "prompt_tokens": len(prompt),
                "predicted_ttft_s": prediction.ttft_s if prediction is not None else None,
                "prefill": choice.prefill.table(cost=costs.get("prefill")),
                "decode": choice.decode.table(cost=costs.get("decode"), alone_cost=costs.get("alone")),
                "winner": {
                    "prefill": _winner(choice.prefill, choice.prefill_row),
                    "decode": _winner(choice.decode, choice.decode_row),
                },
            }
        )

    async def _leases(self, _: _Query) -> Page:
        """What the processes of this router and the workers hold for others, for how long, and until when.

        Also what each worker has swept, and the workers that did not say.
        """
        found = await self.processes.holds()
        workers = self.membership.workers
        asked = (self.inspections.ask(one.mailbox, "leases", _LEASES_TIMEOUT_S) for one in workers)
        swept, silent = {}, []
        for one, said in zip(workers, await asyncio.gather(*asked, return_exceptions=True), strict=True):
            if isinstance(said, TimeoutError):
                silent.append(one.id)
            elif isinstance(said, BaseException):
                raise said
            else:
                report = msgspec.json.decode(said, type=HoldReport)
                found += report.holds
                swept[one.id] = report.swept
        return json_page({"leases": found, "swept": swept, "silent": silent})

    async def _inspect(self, query: _Query) -> Page:
        """?worker=ID&what=memory|tree|nodes|load|metrics|rooms|leases: a worker's own report."""
        worker, what = query.get("worker", ""), query.get("what", "memory")
        mailbox = self.membership.mailboxes(worker)[worker]
        try:
            report = await self.inspections.ask(mailbox, what, _INSPECT_TIMEOUT_S)
        except TimeoutError:
            raise Unavailable(f"worker {worker!r} did not report in time") from None
        return Page(200, "text/plain; charset=utf-8" if what == "tree" else JSON, report)

    async def _index(self, query: _Query) -> Page:
        """?worker=ID: the pages that this process's index has of a worker, by tier, as KV events name them.

        It goes through the whole index.
        """
        (worker,) = self.membership.mailboxes(query.get("worker", ""))
        return json_page(
            {name: sorted(self.index.held(worker, 1 << tier)) for name, tier in _OF_INDEX.items()}
        )


def _winner(candidates: RoleCandidates, row: int | None) -> dict[str, object] | None:
    if row is None:
        return None
    return {"id": candidates.workers.names[row], "hit_tokens": candidates.held(row)}
