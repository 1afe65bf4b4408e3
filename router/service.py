"""Router: everything behind the HTTP edge, composed."""

from __future__ import annotations

import asyncio
import secrets
import time
from itertools import count

from common.errors import ContextTooLong, InvalidRequest, ModelNotFound, Unavailable
from router.directory.client import DirectoryClient
from router.directory.directory import Directory
from router.directory.server import DirectoryServer
from router.events.event_plane import EventPlane
from router.index.global_index import GlobalIndex, as_hashes, digest_hashes
from router.index.page_table import Hashes
from router.metrics import RouterMetrics
from router.options import RouterOptions
from router.placement.load_estimate import WorkerLoadEstimate
from router.placement.peers import TELL_AFTER_S, RouterPeers
from router.placement.placer import Placer
from router.placement.policies import make_policy
from router.placement.policy import Choice
from router.placement.prediction import Prediction
from router.streams.dispatcher import Dispatcher
from router.streams.generation import ChoiceOutput, Generation, Submission
from router.streams.stream import RoomPlan, RoomStream
from router.text.tokenization import Tokenization
from router.trace import RequestTrace, TraceStore
from wire.codec import pack_tokens
from wire.mailbox import Mail
from wire.messages import AssignedLoads, Inspect, SamplingParams, View
from wire.page_hash import namespace_seed, page_digests
from wire.records import Role, WorkerRecord
from wire.security import curve_for
from wire.stages import RequestStage, Stamp

_TICK_S = 0.05
_INSPECT_TIMEOUT_S = 10.0
_NO_PAGES = as_hashes([])


class Router:
    """Start it on an event loop, submit to it there, close it."""

    def __init__(self, options: RouterOptions) -> None:
        """Loads the tokenizer. Raises ConfigError for what cannot work."""
        self.options = options
        self.tokenization = Tokenization(options.model)
        self.metrics = RouterMetrics()
        self.traces = TraceStore()
        self.index = GlobalIndex()
        self.started_at = int(time.time())
        self.context_limit: int | None = None  # the longest prompt + output that every live worker takes
        policy = make_policy(options.policy, options.weights, options.prefill_on_decode_tokens)
        self.placer = Placer(self.index, policy, options.expect_s, self._on_assigned)
        self._rooms_of_this_process = secrets.randbits(31) << 32  # P and D meet rooms of several routers
        self._numbers = count(1)
        self._seed = namespace_seed(options.served_model_name)  # of most requests
        self._dispatcher: Dispatcher | None = None
        self._events: EventPlane | None = None
        self._server: DirectoryServer | None = None
        self._client: DirectoryClient | None = None
        self._peers: RouterPeers | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    # -- life ----------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bind the mailbox and look for workers."""
        options = self.options
        self._loop = asyncio.get_running_loop()
        self._dispatcher = Dispatcher(options, self.placer, self.traces, self.metrics, self._on_other_mail)
        mailbox = self._dispatcher.mailbox
        self._peers = RouterPeers(
            self.placer.fleet, mailbox.address, time.time_ns(), mailbox.send, self._tell_peers_soon
        )
        self._events = EventPlane(self.index, curve_for(options.cluster_secret))
        self.metrics.follow(self._events.counters)
        if options.directory is None:
            directory = Directory(options.lease_s, time.time_ns() // 1_000_000)
            self._server = DirectoryServer(directory, mailbox.send)
        self._client = DirectoryClient(
            options.directory or mailbox.address, mailbox.send, grace_s=options.lease_s * 2
        )
        self._tick()

    async def close(self) -> None:
        """Abort what runs, free ports and threads. Closing twice changes nothing."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._dispatcher is not None and self._events is not None:
            self._dispatcher.close()
            self._events.close()
            self._dispatcher = self._events = None

    def follow_directory(self, address: str) -> None:
        """The directory is at `address` now (an actor that was started again)."""
        assert self._client is not None, "the router is not started"
        self._client.move(address)

    @property
    def mailbox_address(self) -> str:
        """Where workers announce themselves when this router hosts the directory."""
        return self._live().mailbox.address

    @property
    def ready(self) -> bool:
        """A decode worker that takes new work is there."""
        return any(r.role is Role.DECODE and not r.draining for r in self.workers())

    def workers(self) -> list[WorkerRecord]:
        """Live workers of the served model."""
        records = self._client.workers.values() if self._client is not None else ()
        return [record for record in records if record.model == self.options.served_model_name]

    # -- requests ------------------------------------------------------------------------------

    def check_model(self, name: str | None) -> None:
        """Raises ModelNotFound for a name that is not served here."""
        if name is not None and name != self.options.served_model_name:
            raise ModelNotFound(
                f"the model {name!r} does not exist; this is {self.options.served_model_name!r}", "model"
            )

    def room_for(self, prompt: list[int], wanted: int | None, param: str) -> int:
        """How many output tokens a prompt may have: `wanted`, or what the context leaves.

        Raises InvalidRequest for a prompt that is no prompt, ContextTooLong for one that does not fit.
        """
        if not prompt:
            raise InvalidRequest("the prompt is empty", param)
        limit = self.context_limit
        if limit is None:
            if wanted is None:
                raise Unavailable("no worker has said yet how long an answer may be")
            return wanted  # a worker that comes within the wait will judge
        if len(prompt) + (wanted if wanted is not None else 1) > limit:
            raise ContextTooLong(len(prompt) + (wanted if wanted is not None else 1), limit, param)
        return wanted if wanted is not None else limit - len(prompt)

    def submit(self, submission: Submission, stamps: list[Stamp]) -> Generation:
        """Start a request. Raises Overloaded when there is no place for it, or when it would be too late."""
        dispatcher, options = self._live(), self.options
        admission, now = dispatcher.admission, time.monotonic()
        admission.check(len(submission.prompts) * submission.n)
        plans = self._plans(submission)
        judged = admission.judge(dispatcher.placement_request(plans[0]), now)
        generation = Generation(submission, self._on_first, self._on_end)
        trace = RequestTrace(submission.request_id, [plan.room for plan in plans], submission.arrived_ns)
        trace.router_stamps = [*stamps, Stamp(RequestStage.TOKENIZER_DISPATCH, time.time_ns())]
        self.traces.open(trace)
        detokenizers = self.tokenization.detokenizers
        for index, plan in enumerate(plans):
            detokenizer = detokenizers.make(submission.skip_special_tokens)
            output = ChoiceOutput(index, generation, detokenizer, submission.stop)
            output.room = RoomStream(plan, dispatcher, output, options)
            generation.outputs.append(output)
        rooms = [output.room for output in generation.outputs if output.room is not None]
        dispatcher.open(rooms, judged, now)
        return generation

    def explain(
        self,
        prompt: list[int],
        extra_key: str = "",
        cache_salt: str = "",
        session: str = "",
        tenant: str = "",
    ) -> tuple[Choice, Prediction | None] | None:
        """What the policy would choose for a prompt now, and when its first token would come."""
        submission = Submission(
            "explain", [prompt], SamplingParams(), extra_key=extra_key, cache_salt=cache_salt,
            tenant=tenant, session=session,
        )  # fmt: skip
        dispatcher = self._live()
        request = dispatcher.placement_request(self._plans(submission)[0])
        choice = self.placer.choose(request, time.monotonic())
        return None if choice is None else (choice, dispatcher.admission.predict(choice))

    async def inspect(self, worker_id: str, what: str) -> str:
        """A worker's own report. Raises InvalidRequest for a stranger, TimeoutError for a silent one."""
        record = next((record for record in self.workers() if record.id == worker_id), None)
        if record is None:
            there = ", ".join(sorted(record.id for record in self.workers())) or "none"
            raise InvalidRequest(f"no worker is called {worker_id!r}; there are: {there}", "worker")
        token = next(self._numbers)
        return await self._live().inspect(record, token, Inspect(what, token), _INSPECT_TIMEOUT_S)

    def accounts(self) -> list[dict[str, object]]:
        """The load that this router and the others have assigned to each worker."""
        estimates = self.placer.fleet.estimates()
        return [{"id": one.record.id, "own": one.own, "peers": one.peers} for one in estimates]

    def metrics_text(self) -> bytes:
        """The Prometheus exposition, with what is measured on demand."""
        records = self.workers()
        for role in Role:
            self.metrics.workers.labels(str(role)).set(sum(record.role is role for record in records))
        self.metrics.rooms.set(len(self._live().rooms))
        self.metrics.queued_rooms.set(len(self._live().waiting))
        self.metrics.index_pages.set(len(self.index))
        self.metrics.peers.set(len(self._peers) if self._peers is not None else 0)
        return self.metrics.text()

    # -- inside --------------------------------------------------------------------------------

    def _live(self) -> Dispatcher:
        assert self._dispatcher is not None, "the router is not started"
        return self._dispatcher

    def _plans(self, submission: Submission) -> list[RoomPlan]:
        page_tokens = self.placer.page_tokens
        plans = []
        for prompt in submission.prompts:
            packed = pack_tokens(prompt)
            hashes: Hashes = _NO_PAGES
            if page_tokens:
                seed = self._seed
                if submission.extra_key or submission.cache_salt:
                    seed = namespace_seed(
                        self.options.served_model_name, submission.extra_key, submission.cache_salt
                    )
                hashes = digest_hashes(page_digests(seed, packed, page_tokens))
            for choice in range(submission.n):
                plans.append(
                    RoomPlan(
                        request_id=submission.request_id,
                        room=self._rooms_of_this_process | next(self._numbers),
                        prompt=packed,
                        prompt_tokens=len(prompt),
                        page_hashes=hashes,
                        sampling=submission.sampling,
                        choice=choice,
                        extra_key=submission.extra_key,
                        cache_salt=submission.cache_salt,
                        tenant=submission.tenant,
                        priority=submission.priority,
                        session=submission.session,
                    )
                )
        return plans

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
        if generation.abandoned():
            metrics.aborts.inc()
        else:
            for output in generation.outputs:
                if output.tokens:
                    self.placer.answered(output.tokens)
        metrics.prompt_tokens.inc(generation.prompt_tokens())
        metrics.cached_tokens.inc(generation.cached_tokens())
        metrics.output_tokens.inc(generation.completion_tokens())

    def _tick(self) -> None:
        assert self._loop is not None
        assert self._client is not None
        self._timer = self._loop.call_later(_TICK_S, self._tick)
        now = time.monotonic()
        if self._server is not None:
            self._server.tick(now)
        self._client.tick(now)
        self._live().tick(now)
        if self._peers is not None:
            self._peers.tick(now)

    def _on_assigned(self, estimate: WorkerLoadEstimate) -> None:
        if self._peers is not None:
            self._peers.assigned(estimate)

    def _tell_peers_soon(self) -> None:
        assert self._loop is not None
        self._loop.call_later(TELL_AFTER_S, self._tell_peers)

    def _tell_peers(self) -> None:
        if self._dispatcher is not None and self._peers is not None:  # else the router was closed meanwhile
            self._peers.flush()

    def _on_other_mail(self, mail: Mail, now: float) -> None:
        if self._server is not None and self._server.handle(mail, now):
            return
        if isinstance(mail.message, View):
            self._on_view(mail.message, now)
        elif isinstance(mail.message, AssignedLoads) and self._peers is not None:
            self._peers.take(mail.sender, mail.message, now)

    def _on_view(self, view: View, now: float) -> None:
        assert self._client is not None
        assert self._events is not None
        dispatcher = self._live()
        change = self._client.take(view, now)
        records = self.workers()
        self.context_limit = min((record.max_context_tokens for record in records), default=None)
        self.placer.update(records, now)
        if self._peers is not None:
            self._peers.meet(view.routers)
        for record in change.lost:
            self._events.forget(record.id)
            dispatcher.lost(record, now)
        for record in change.joined:
            if record.model == self.options.served_model_name:
                self._events.follow(record)
        dispatcher.admit(now)
