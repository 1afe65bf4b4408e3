"""From a parsed request to its answer: what the OpenAI API and /generate have in common."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from typing import Any, Protocol

from msgspec.structs import replace

from common.errors import BatonError, InvalidRequest, TimeLimit
from router.api.asgi import HttpRequest
from router.api.event_ids import EventIds, NoIds
from router.api.request_body import LONGEST_LABEL, MOST_ROOMS, RequestBody, SamplingBody
from router.model import Model
from router.request_lines import error_name, generated
from router.service import Router
from router.streams.assignments import Assignment
from router.streams.claims import FoundRoom
from router.streams.generation import Answer, ChoiceCounts, Generation, Submission
from router.streams.resume import HEADER, MOST_CHOICES, ChoicePosition, Resumption
from router.streams.resumed_output import Resumed
from router.text.long_texts import LONG
from router.text.output_formats import Parsing
from wire.request import NO_MARKS, OutputDelta, PromptMarks, SamplingParams

_QUIET_S = 2.5  # a stream to which nothing is sent for this long, or twice as long, is sent a comment
DONE = b"data: [DONE]\n\n"
_LAST_EVENT_ID = HEADER.lower().encode()
_SESSIONS_OF_AGENTS = (b"x-claude-code-session-id", b"x-session-affinity", b"session-id")
"""Headers in which Claude Code, OpenCode and Codex name a conversation."""


class StreamedAnswer(Answer, Protocol):
    """An answer whose events are sent while it grows."""

    def replay(self, choice: ChoiceCounts, text: str, delta: OutputDelta) -> None:
        """A choice has gained what the client has already: no event says it again."""

    @property
    def events(self) -> list[bytes]:
        """The events that have not been taken yet. `take` puts another list in its place."""

    def take(self) -> bytes:
        """The events that have not been taken yet."""

    @property
    def waiting(self) -> bytes:
        """What is sent when nothing has come for a while."""

    def failure(self, error: BatonError) -> bytes:
        """The event that ends a stream which fails after its head."""

    def end(self, generation: Generation) -> bytes:
        """The events that follow the last token."""


def is_batch(given: Any) -> bool:
    """Whether several prompts were given: a list of texts or of lists of token ids."""
    return not (isinstance(given, str) or (given and isinstance(given[0], int)))


async def encode_prompts(
    model: Model,
    given: Any,
    param: str,
    n: int,
    add_special_tokens: bool,
    any_length: bool = False,
    most: int = MOST_ROOMS,
) -> list[list[int]]:
    """Token ids of each prompt, or of the only one. Raises InvalidRequest for ids outside the vocabulary, and
    for no choice or more than `most` (`n` of each prompt); and what Model.encode raises."""
    prompts: list[list[int]] = []
    at_once = 0  # characters or tokens since other requests had their turn
    batch = given if is_batch(given) else [given]
    if not batch:
        raise InvalidRequest("there is no prompt", param)
    if len(batch) * n > most:
        raise InvalidRequest(f"{len(batch)} prompts with n={n} are more than {most} choices", "n")
    for prompt in batch:
        at_once += len(prompt)
        if at_once > LONG:  # as long for the event loop as one text that goes to a thread
            await asyncio.sleep(0)
            at_once = len(prompt)
        if isinstance(prompt, str):
            prompts.append(await model.encode(prompt, add_special_tokens, param, any_length))
        else:
            prompts.append(_known_tokens(model, prompt, param))
    return prompts


def _known_tokens(model: Model, tokens: list[int], param: str) -> list[int]:
    if tokens and max(tokens) >= model.tokenization.vocab_size:
        raise InvalidRequest(
            f"token {max(tokens)} is not in the vocabulary of {model.tokenization.vocab_size}", param
        )
    return tokens


def _label(request: HttpRequest, name: bytes) -> str | None:
    value = request.header(name)
    if value is not None and len(value) > LONGEST_LABEL:
        raise InvalidRequest(f"this header has more than {LONGEST_LABEL} characters", name.decode())
    return value


def _session(request: HttpRequest, named: str) -> str:
    """The conversation that a request belongs to: our header's, the body's, or what a coding agent calls it.
    "": nobody says."""
    if own := _label(request, b"x-baton-session") or named:
        return own
    others = (request.header(name) for name in _SESSIONS_OF_AGENTS)
    return next((one for one in others if one and len(one) <= LONGEST_LABEL), "")


def tenant_of(router: Router, request: HttpRequest) -> str:
    """The key's tenant, or the one that a gateway names. A client cannot choose whose cache it shares."""
    key, header = request.key, router.options.trusted_tenant_header
    if header is not None and (key is None or key.gateway):
        return _label(request, header.lower().encode()) or ""
    return "" if key is None else key.tenant


async def make_submission(
    router: Router,
    model: Model,
    request: HttpRequest,
    body: RequestBody,
    params: SamplingBody,
    prompts: list[list[int]],
    sampling: SamplingParams,
    session: str = "",
    length_given: bool = True,
    opening: str = "",
    parsing: Parsing | None = None,
) -> Submission:
    """What the router is asked to do. The client's key decides its tenant, and how far its priority goes.

    Raises InvalidRequest.
    """
    if request.header(_LAST_EVENT_ID) and not body.stream:
        raise InvalidRequest("only a stream can be resumed: repeat this request without the header", HEADER)
    key, tenant = request.key, tenant_of(router, request)
    marks = await _marks(router, model, tenant, prompts, body.private_from_page)
    return Submission(
        request_id=request.request_id,
        prompts=prompts,
        model=model.name,
        sampling=sampling,
        n=params.n,
        stop=params.stops(),
        skip_special_tokens=params.skip_special_tokens,
        kept_special=frozenset() if parsing is None else parsing.kept,
        unsaid_behind=frozenset() if parsing is None else parsing.unsaid_behind,
        keep_stop=params.include_stop_str_in_output or params.no_stop_trim,
        extra_key=body.extra_key,
        cache_salt=body.cache_salt,
        tenant=tenant,
        priority=body.priority if key is None else min(body.priority, key.max_priority),
        session=_session(request, session),
        opening=opening,
        arrived_ns=request.arrived_ns,
        traceparent="" if request.span is None else request.span.traceparent,
        first_room=router.number_rooms(len(prompts) * params.n),
        seed_given=params.seed is not None,
        length_given=length_given,
        marks=marks,
    )


async def _marks(
    router: Router, model: Model, tenant: str, prompts: list[list[int]], private_from: int | None
) -> tuple[PromptMarks, ...]:
    """What workers are told of each prompt. `private_from`: the page that the request names; the operator's
    hook may name an earlier one."""
    asked = [
        router.private_hook.private_from(tenant, prompt, model.tokenization.decode) for prompt in prompts
    ]
    marks = []
    for prompt, found in zip(prompts, await asyncio.gather(*asked), strict=True):
        pages = [page for page in (private_from, found) if page is not None]
        marks.append(model.public_prefixes.marks(prompt, min(pages, default=None)))
    return () if all(one is NO_MARKS for one in marks) else tuple(marks)


@contextmanager
def generating(
    router: Router,
    request: HttpRequest,
    submission: Submission,
    assignment: Assignment,
    answer: Answer,
    resumed: Resumed | None = None,
) -> Iterator[Generation]:
    """Submit, and stop what still runs when the block ends, the client goes, or the operator's limit of time
    has passed."""
    generation = router.submit(submission, assignment, answer, resumed)
    watch, limit = request.watch(generation), router.options.max_request_s
    loop = asyncio.get_running_loop()
    timer = None if limit is None else loop.call_later(limit, _end_late, generation, limit)
    try:
        yield generation
    finally:
        watch.cancel()
        if timer is not None:
            timer.cancel()
        generation.cancel()
        _tell(router, request, generation)
        generation.close()


def _end_late(generation: Generation, limit: float) -> None:
    generation.fail(TimeLimit(f"this request has run for {limit:g} s, and no request may run for longer"))


def _tell(router: Router, request: HttpRequest, generation: Generation) -> None:
    """Keep what the generation has come to for the request's line, if there are lines."""
    lines, submission = router.request_lines, generation.submission
    if lines is None:
        return
    decode = router.model(submission.model).tokenization.decode
    prompts = [decode(prompt, False) for prompt in submission.prompts] if lines.with_prompts else None
    told = generated(generation, router.traces.get(submission.request_id), prompts)
    request.generated = told if request.generated is None else request.generated + told
    request.error = error_name(generation.error)


class _QuietTimer:
    """Lets a generation notice that nothing comes. Its tokens cost nothing more for that."""

    def __init__(self, generation: Generation) -> None:
        self._generation = generation
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(_QUIET_S, self._check)

    def close(self) -> None:
        """Stop."""
        self._timer.cancel()

    def _check(self) -> None:
        self._timer = self._loop.call_later(_QUIET_S, self._check)
        self._generation.check_quiet()


async def stream(
    router: Router,
    request: HttpRequest,
    submission: Submission,
    form: str,
    make_answer: Callable[[Submission, EventIds], StreamedAnswer],
    repeats: bool = False,
) -> None:
    """Serve a request as events, from where its Last-Event-ID says. `form` names the kind of its events,
    `repeats` says that each tells the whole answer so far.

    Events have ids for clients that accept text/event-stream by name: others, such as vLLM's and SGLang's
    benchmarks, take every line of a stream for data.

    The head goes out with the first token, so that what fails before has an HTTP status of its own. When an
    accepted request is quiet for a while, it goes out with a comment, so that nobody on the way takes the
    connection for dead. A stream that fails later ends in an error event, and without [DONE].
    """
    last_id, now = request.header(_LAST_EVENT_ID), time.time()
    positions = [ChoicePosition()] * submission.choice_count
    found: dict[int, FoundRoom] = {}
    resumption: Resumption | None = None
    if last_id:
        resumption = router.resume_tokens.open(last_id, submission, form, now)
        submission, positions = resumption.submission, resumption.positions
        found = await router.claim(resumption, repeats)
        if found:
            submission = replace(submission, first_room=resumption.first_room)
    assignment = router.assign(submission, resumption, found)
    ids: EventIds = NoIds()
    if len(positions) <= MOST_CHOICES and (last_id or request.accepts_events()):
        sign = router.resume_tokens.sign
        ids = EventIds(lambda: sign(submission, form, assignment.version.tag, now), positions)
    answer = make_answer(submission, ids)
    resumed = Resumed(positions, answer.replay, found) if last_id else None
    with (
        generating(router, request, submission, assignment, answer, resumed) as generation,
        closing(_QuietTimer(generation)),
    ):
        async with router.clients.sending(generation, answer):
            await _send_stream(request, generation, answer)


async def _send_stream(request: HttpRequest, generation: Generation, answer: StreamedAnswer) -> None:
    await generation.more()
    if generation.abandoned:
        return
    await request.begin_sse()
    try:
        end = await _send_events(request, generation, answer) + answer.end(generation)
    except BatonError as error:
        end = answer.failure(error)
    if not generation.abandoned:
        await request.send_sse(end, more=False)


async def _send_events(request: HttpRequest, generation: Generation, answer: StreamedAnswer) -> bytes:
    """Send events until none follow. Returns the last, not sent: what ends the stream goes with them.

    Raises the BatonError that ended the request.
    """
    while True:
        events = answer.waiting if generation.quiet else answer.take()
        if generation.complete:
            return events
        await request.send_sse(events)
        if not await generation.more():
            return b""
