"""HandOff: a request passes from one worker's scheduler to another's.

decode worker     prefetch ─> reserve ─> add_transferred, or cancel_reservation
prefill worker    (on_prefilled answers HAND_OFF) ─> release, or park ─> readmit ─> on_prefilled again
a decode worker   pause ─> release, or resume
that has it
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kvcache.memory import GroupPages
from scheduler.budget import BatchAdmission
from scheduler.req import Req, ReqState
from scheduler.request_table import RequestTable
from scheduler.results import Results
from wire.messages.rooms import RejectKind
from wire.request import TokenLogprobs


class HandOff:
    """The operations of both sides of a transfer. Called on the scheduler's thread."""

    def __init__(
        self,
        requests: RequestTable,
        admission: BatchAdmission,
        results: Results,
        take_results: Callable[[int], bool],
        pre_alloc_rows: int,
    ) -> None:
        """At most `pre_alloc_rows` requests are reserved, or have their KV and do not run yet, at a time.
        `take_results` takes results until at most so many forwards are in flight."""
        self._requests = requests
        self._admission = admission
        self._results = results
        self._take_results = take_results
        self._pre_alloc_rows = pre_alloc_rows

    # -- on the decode worker ------------------------------------------------------------------------

    def prefetch(self, req: Req) -> None:
        """Begin to read what storage has of the prompt: `reserve` waits for it. Those that come later wait
        for their own reads meanwhile."""
        req.aim_prefill()
        pages = self._requests.pages
        pages.lower.prefetch(req, pages.key(req, req.prefill_len))

    def reserve(self, req: Req, slack: int = 0) -> bool:
        """Lock what is cached of the prompt, and take a row and pages for the rest, and for at most `slack`
        tokens that the request may have more when it comes.

        After True, `req.reserved` names the pages that a transfer must fill, by group. After False, try again
        after a step, unless `req.state` is DONE: then the request can never fit, and on_failed has been
        called. A request that is not tried again for `budget.CLAIM_STEPS` steps loses its place in the order.
        """
        req.aim_prefill()
        self._admission.lower_limit(req)
        why = self._admission.why_never(req)
        if why:
            self._results.fail(req, RejectKind.INVALID, why)
            return False
        if self._free_rows() <= 0 or not self._admission.reserve(req, slack):
            return False
        self._requests.enrol(req)
        req.state = ReqState.RESERVED
        return True

    def withdraw(self, req: Req) -> None:
        """A request that `reserve` has refused will not be tried again: it loses its place in the order."""
        self._admission.withdraw(req)

    def cancel_reservation(self, req: Req) -> GroupPages:
        """Give back the row and the locks of a reservation. Returns its pages, which are still allocated.

        A peer may still write to them: they belong in `memory.quarantine` until the transport's fence has
        passed.
        """
        assert req.state is ReqState.RESERVED, f"{req} is not reserved"
        pages = self._requests.reservations.split(req)
        self._requests.end(req)
        return pages

    def filled(self, req: Req, context_tokens: int) -> dict[str, npt.NDArray[np.int64]]:
        """Of the pages that `req.reserved` names, those that a transfer of this many tokens fills, by group:
        not the slack that was not needed, nor pages that have left the window."""
        return self._requests.reservations.filled(req, context_tokens)

    def add_transferred(
        self,
        req: Req,
        first_token: int,
        logprobs: TokenLogprobs | None,
        cached_tokens: int,
        output: Sequence[int] = (),
        output_logprobs: Sequence[TokenLogprobs] = (),
    ) -> None:
        """The KV of the prompt and of `output` has arrived, and the other worker sampled `first_token`.

        All of it enters this worker's tree, tokens are reported like any others, and the request decodes
        without a forward over its prompt. `cached_tokens` is how much of the prompt the other worker had
        cached: what it computed again, this worker's cache did not save. `output` is what that worker has
        sampled in this request since `reserve`. Where log-probabilities are asked for, `output_logprobs` are
        those of its last tokens, and only these are reported: the others were before.
        """
        assert req.state is ReqState.RESERVED, f"{req} is not reserved"
        length = req.prefill_len + len(output)
        assert length <= req.kv_allocated_len, f"{req} got more than was reserved"
        req.state = ReqState.TRANSFERRED
        for token in output:
            req.output_ids.append(token)
        if logprobs is not None:
            req.emitted_len += len(output) - len(output_logprobs)
        req.kv_committed_len = req.scheduled_len = length
        req.cached_tokens = cached_tokens
        self._requests.reservations.settle(req, length)
        self._requests.pages.cache_prefix(req, self._results.last_launch)
        req.output_ids.append(first_token)
        self._requests.transferred.append(req)
        self._results.report(req, None if logprobs is None else [*output_logprobs, logprobs])

    def headroom_rows(self) -> int:
        """How many more requests can be reserved, as far as rows, state slots and window pages go."""
        return max(min(self._free_rows(), self._admission.more_requests()), 0)

    def _free_rows(self) -> int:
        return self._pre_alloc_rows - self._requests.count(ReqState.RESERVED, ReqState.TRANSFERRED)

    # -- on a decode worker that has the request -----------------------------------------------------

    def pause(self, req: Req) -> bool:
        """Take a decoding request out of the batch; it keeps its row, pages and locks, and its growth stays
        promised. Not to be called from a NodePolicy's methods.

        A launched forward has to end first: its result is waited for and taken, so output may be reported.
        After True, the KV of `req.kv_committed_len` tokens is valid, all but the last token's, and nothing
        changes until `resume`, `release` or `Scheduler.abort`. False when the request does not decode: it
        waits for its prefill or is in it (try again later), or it is over.
        """
        if req.in_flight:
            self._take_results(0)
        if req.state not in (ReqState.RUNNING, ReqState.TRANSFERRED):
            return False
        self._requests.pause(req)
        return True

    def resume(self, req: Req) -> None:
        """Let a paused request go on where it was: it joins the batch as soon as there is a place."""
        self._requests.resume(req)

    # -- on a worker that hands a request off --------------------------------------------------------

    def release(self, req: Req, is_insert: bool = True) -> None:
        """End a request that is handed off, parked or paused. `is_insert`: its KV may stay in the tree."""
        ends = (ReqState.HANDED_OFF, ReqState.PARKED, ReqState.PAUSED, ReqState.DONE)
        assert req.state in ends, f"{req} is not handed off"
        self._requests.end(req, is_insert)

    def park(self, req: Req) -> None:
        """Hold nothing unevictable for a handed-off request until `readmit`."""
        self._requests.park(req)

    def readmit(self, req: Req) -> None:
        """Queue a parked request to bring its KV back: what is no longer cached is computed again.

        It ends in another call of on_prefilled. No token is reported again.
        """
        assert req.state is ReqState.PARKED, f"{req} is not parked"
        self._requests.enrol(req)
        self._requests.wait(req, kv_only=True)
