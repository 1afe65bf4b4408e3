"""Router: everything behind the HTTP edge, composed."""

from __future__ import annotations

import asyncio
import secrets
import time
from functools import partial
from itertools import count

from prometheus_client import CollectorRegistry

from common.errors import ContextTooLong, InvalidRequest, ModelNotFound, Unavailable
from router.events.event_plane import EventPlane
from router.index.global_index import GlobalIndex, as_hashes, digest_hashes
from router.membership import Membership
from router.metrics import EventMetrics, LevelMetrics, RequestMetrics, RoomMetrics
from router.options import RouterOptions
from router.placement.load_estimate import WorkerLoadEstimate
from router.placement.placer import Placer
from router.placement.policies import make_policy
from router.placement.policy import Choice, PlacementRequest
from router.placement.prediction import Prediction
from router.process_group import ProcessGroup
from router.streams.dispatcher import Dispatcher
from router.streams.generation import Answer, ChoiceOutput, Generation, Submission
from router.streams.inspections import Inspections
from router.streams.stream import RoomStream
from router.text.tokenization import Tokenization
from router.trace import RequestTrace, TraceStore
from wire.codec import pack_tokens
from wire.loop_mailbox import LoopMailbox
from wire.mailbox import Mail
from wire.messages import GenerateRequest, Inspect, Inspected
from wire.page_hash import namespace_seed, page_digests
from wire.security import curve_for
from wire.stages import RequestStage, Stamp

_TICK_S = 0.05
_INSPECT_TIMEOUT_S = 10.0
_NO_PAGES = as_hashes([])


class Router:
    """Lives on the event loop on which it is made. Submit to it there, and close it."""

    def __init__(self, options: RouterOptions, first_process: str | None = None) -> None:
        """Load the tokenizer, bind the mailbox, look for workers. Raises ConfigError for what cannot work.

        `first_process` is the mailbox of the process that started this one, if one did (processes.py).
        """
        self.options = options
        self.tokenization = Tokenization(options.model)
        registry = CollectorRegistry()
        self.metrics = RequestMetrics(registry)
        self.traces = TraceStore()
        self.index = GlobalIndex()
        self.started_at = int(time.time())
        policy = make_policy(options.policy, options.weights, options.prefill_on_decode_tokens)
        self.placer = Placer(self.index, policy, options.expect_s, self._on_assigned)
        self._rooms_of_this_process = secrets.randbits(31) << 32  # P and D meet rooms of several routers
        self._numbers = count(1)
        self._seed = namespace_seed(options.served_model_name)  # of most requests
        curve = curve_for(options.cluster_secret)
        self._mailbox = LoopMailbox(options.interface, curve, self._on_mail)
        self.mailbox_address = self._mailbox.address  # also of the directory, if this router hosts it
        self._inspections = Inspections(self._mailbox.send)
        self._events = EventPlane(self.index, curve)
        self._dispatcher = Dispatcher(
            options, self.placer, self.traces, RoomMetrics(registry), self._mailbox.send
        )
        self.membership = Membership(options, self._mailbox, self.placer, self._events, self._dispatcher)
        EventMetrics(registry, self._events.counters)
        dispatcher, membership = self._dispatcher, self.membership
        LevelMetrics(
            registry,
            dispatcher.rooms,
            dispatcher.waiting,
            membership.peers,
            self.index,
            lambda: membership.workers,
        )
        self.processes = ProcessGroup(
            registry, self.traces, self._mailbox.send, self._inspections, first_process
        )
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_soon(self._tick)

    def close(self) -> None:
        """Abort what runs, free ports and threads. Closing twice changes nothing."""
        self._timer.cancel()
        self._dispatcher.close()
        self.membership.close()
        self.processes.close()
        self._mailbox.close()
        self._events.close()

    # -- requests ------------------------------------------------------------------------------

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound for a name that is not served here."""
        if name is not None and name != self.options.served_model_name:
            raise ModelNotFound(
                f"the model {name!r} does not exist; this is {self.options.served_model_name!r}", "model"
            )

    def room_for(self, prompt: list[int], wanted: int | None, param: str) -> int:
        """How many output tokens a prompt may have: `wanted`, or what the context leaves.

        Raises InvalidRequest for an empty prompt, ContextTooLong for one that does not fit.
        """
        if not prompt:
            raise InvalidRequest("the prompt is empty", param)
        limit = self.membership.context_limit
        if limit is None:
            if wanted is None:
                raise Unavailable("no worker has said yet how long an answer may be")
            return wanted  # a worker that comes within the wait will judge
        if len(prompt) + (wanted if wanted is not None else 1) > limit:
            raise ContextTooLong(len(prompt) + (wanted if wanted is not None else 1), limit, param)
        return wanted if wanted is not None else limit - len(prompt)

    def submit(self, submission: Submission, answer: Answer) -> Generation:
        """Start a request. Raises Overloaded when there is no place for it, or when it would be too late."""
        dispatcher, now = self._dispatcher, time.monotonic()
        dispatcher.admission.check(submission.choice_count)
        asked = self._asked(submission)
        judged = dispatcher.admission.judge(asked[0][1], now)
        numbers = [request.room for request, _ in asked]
        stamps = [
            Stamp(RequestStage.TOKENIZE, submission.arrived_ns),
            Stamp(RequestStage.TOKENIZER_DISPATCH, time.time_ns()),
        ]
        self.traces.open(RequestTrace(submission.request_id, numbers, submission.arrived_ns, stamps))
        stop = partial(dispatcher.stop, numbers)
        generation = Generation(submission, answer, stop, self._on_first, self._on_end)
        rooms = []
        for counts, (request, placement_request) in zip(generation.choices, asked, strict=True):
            detokenizer = self.tokenization.detokenizers.make(submission.skip_special_tokens)
            output = ChoiceOutput(counts, generation, detokenizer, submission.stop)
            rooms.append(
                RoomStream(request, placement_request, dispatcher, dispatcher.mail, output, self.options)
            )
        dispatcher.open(rooms, judged, now)
        return generation

    def explain(self, submission: Submission) -> tuple[Choice, Prediction | None] | None:
        """What the policy would choose for a request now, and when the first token would come."""
        _, placement_request = self._asked(submission)[0]
        choice = self.placer.choose(placement_request, time.monotonic())
        return None if choice is None else (choice, self._dispatcher.admission.predict(choice))

    async def inspect(self, worker_id: str, what: str) -> str:
        """A worker's own report. Raises InvalidRequest for an unknown one, TimeoutError for a silent one."""
        addresses = {record.id: record.mailbox for record in self.membership.workers}
        if worker_id not in addresses:
            there = ", ".join(sorted(addresses)) or "none"
            raise InvalidRequest(f"no worker is called {worker_id!r}; there are: {there}", "worker")
        return await self._inspections.ask(addresses[worker_id], what, _INSPECT_TIMEOUT_S)

    def accounts(self) -> list[dict[str, object]]:
        """The load that this router and the others have assigned to each worker."""
        estimates = self.placer.fleet.estimates()
        return [{"id": one.record.id, "own": one.own, "peers": one.peers} for one in estimates]

    # -- inside --------------------------------------------------------------------------------

    def _asked(self, submission: Submission) -> list[tuple[GenerateRequest, PlacementRequest]]:
        """What workers and the policy are told of each choice."""
        s, page_tokens = submission, self.placer.page_tokens
        seed = self._seed
        if s.extra_key or s.cache_salt:
            seed = namespace_seed(self.options.served_model_name, s.extra_key, s.cache_salt)
        output_tokens = self.placer.output_tokens(s.sampling.max_new_tokens)
        asked = []
        for prompt in s.prompts:
            packed = pack_tokens(prompt)
            hashes = digest_hashes(page_digests(seed, packed, page_tokens)) if page_tokens else _NO_PAGES
            placement_request = PlacementRequest(
                len(prompt), hashes, output_tokens, s.session, s.tenant, s.priority
            )
            for choice in range(s.n):
                request = GenerateRequest(
                    request_id=s.request_id, sampling=s.sampling, extra_key=s.extra_key,
                    cache_salt=s.cache_salt, tenant=s.tenant, priority=s.priority,
                    room=self._rooms_of_this_process | next(self._numbers), epoch=0, prompt=packed,
                    choice=choice,
                )  # fmt: skip
                asked.append((request, placement_request))
        return asked

    def _on_assigned(self, estimate: WorkerLoadEstimate) -> None:
        self.membership.peers.assigned(estimate)

    def _on_first(self, generation: Generation) -> None:
        trace = self.traces.get(generation.submission.request_id)
        if trace is not None:
            trace.first_token_ns = time.time_ns()
            self.metrics.ttft.observe((trace.first_token_ns - trace.arrived_ns) / 1e9)

    def _on_end(self, generation: Generation) -> None:
        metrics, trace = self.metrics, self.traces.get(generation.submission.request_id)
        if trace is not None:
            trace.finished_ns = time.time_ns()
            metrics.latency.observe((trace.finished_ns - trace.arrived_ns) / 1e9)
        if generation.abandoned:
            metrics.aborts.inc()
        else:
            for choice in generation.choices:
                if choice.output_tokens:
                    self.placer.answered(choice.output_tokens)
        metrics.prompt_tokens.inc(generation.prompt_tokens())
        metrics.cached_tokens.inc(generation.cached_tokens())
        metrics.output_tokens.inc(generation.output_tokens())

    def _tick(self) -> None:
        self._timer = self._loop.call_later(_TICK_S, self._tick)
        now = time.monotonic()
        self.membership.tick(now)
        self._dispatcher.tick(now)

    def _on_mail(self, batch: list[Mail]) -> None:
        now = time.monotonic()
        for mail in batch:
            if self._dispatcher.take(mail, now) or self.membership.take(mail, now):
                continue
            if isinstance(mail.message, Inspected):
                self._inspections.answer(mail.message)
            elif isinstance(mail.message, Inspect):
                self.processes.answer(mail.sender, mail.message)
