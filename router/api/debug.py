"""Health, metrics, and pages that show a running router from inside."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version

import msgspec

from common.errors import InvalidRequest, Unavailable
from router.api.asgi import JSON, HttpRequest
from router.api.http_errors import error_body
from router.placement.policy import RoleCandidates
from router.service import Router
from router.streams.generation import Submission
from wire.request import SamplingParams


async def health(_: Router, request: HttpRequest) -> None:
    """GET /health: 200 as long as the event loop runs."""
    await request.respond_json({"status": "ok"})


async def ready(router: Router, request: HttpRequest) -> None:
    """GET /ready: 503 until a decode worker is there."""
    if not router.membership.ready:
        raise Unavailable("no decode worker is there yet")
    await request.respond_json({"status": "ready"})


async def version(_: Router, request: HttpRequest) -> None:
    """GET /version."""
    try:
        found = installed_version("baton-serve")
    except PackageNotFoundError:
        found = "unpackaged"  # run from a working directory (Ray's), not installed
    await request.respond_json({"version": found})


async def metrics(router: Router, request: HttpRequest) -> None:
    """GET /metrics, for Prometheus: of all processes of this router."""
    kind = b"text/plain; version=0.0.4; charset=utf-8"
    await request.respond(200, await router.processes.metrics(), [(b"content-type", kind)])


async def trace(router: Router, request: HttpRequest) -> None:
    """GET /debug/trace/{request id}: its timeline, for chrome://tracing or Perfetto."""
    request_id = request.path.rsplit("/", 1)[1]
    found = await router.processes.trace(request_id)
    if found is None:
        body = error_body(f"no trace of request {request_id!r} is kept", "invalid_request_error")
        await request.respond_json(body, 404)
    else:
        await request.respond(200, found, [JSON])


async def workers(router: Router, request: HttpRequest) -> None:
    """GET /debug/workers: the directory's view, and the load that routers have assigned to each worker."""
    await request.respond_json({"workers": router.membership.workers, "accounts": router.accounts()})


async def suspicions(router: Router, request: HttpRequest) -> None:
    """GET /debug/suspicions: the last few hundred workers that each process did not believe to be alive.

    Each with the process, the cause, when the suspicion began and when it ended (null: it has not).
    `broken_pairs` are prefill and decode workers that did not get through to each other, as seen here;
    neither is suspected for that.
    """
    pairs = list(router.placer.broken_pairs.history)
    rows = await router.processes.suspicions()
    await request.respond_json({"suspicions": rows, "broken_pairs": pairs})


async def rooms(router: Router, request: HttpRequest) -> None:
    """GET /debug/rooms: all rooms of this router, their workers, and what those said of silent rooms."""
    await request.respond_json({"rooms": await router.processes.rooms()})


async def route(router: Router, request: HttpRequest) -> None:
    """GET /debug/route?prompt=...: which workers the policy would choose now, and what each would cost.

    The answer has a list of workers for each role. A cost is null for a worker that was not considered, and
    for a policy without costs. The query may also have extra_key, cache_salt, session and tenant.
    """
    query = request.query()
    if "prompt" not in query:
        raise InvalidRequest("the query has no prompt", "prompt")
    prompt = router.tokenization.encode(query["prompt"])
    submission = Submission(
        request_id=request.request_id, prompts=[prompt], sampling=SamplingParams(),
        extra_key=query.get("extra_key", ""), cache_salt=query.get("cache_salt", ""),
        session=query.get("session", ""), tenant=query.get("tenant", ""),
    )  # fmt: skip
    explained = router.explain(submission)
    if explained is None:
        raise Unavailable("no decode worker is there")
    choice, prediction = explained
    costs = router.placer.costs(choice)
    await request.respond_json(
        {
            "policy": router.options.policy,
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


def _winner(candidates: RoleCandidates, row: int | None) -> dict[str, object] | None:
    if row is None:
        return None
    return {"id": candidates.workers.names[row], "hit_tokens": candidates.held(row)}


async def leases(router: Router, request: HttpRequest) -> None:
    """GET /debug/leases: what the processes of this router and the workers hold for others, for how long, and
    until when."""
    found, swept, silent = await router.holds()
    await request.respond_json({"leases": found, "swept": swept, "silent": silent})


async def inspect(router: Router, request: HttpRequest) -> None:
    """GET /debug/inspect?worker=ID&what=memory|tree|nodes|load|metrics|rooms|leases: a report by a worker."""
    query = request.query()
    what = query.get("what", "memory")
    try:
        report = await router.inspect(query.get("worker", ""), what)
    except TimeoutError:
        raise Unavailable(f"worker {query.get('worker')!r} did not report in time") from None
    if what != "tree":
        await request.respond_json(msgspec.Raw(report.encode()))
    else:
        await request.respond(200, report.encode(), [(b"content-type", b"text/plain; charset=utf-8")])
