"""FetchTable: requests that wait for pages of their prompt from another worker, before they are queued."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from kvcache.memory import GroupPages
from scheduler.budget import BatchAdmission
from scheduler.fetches import FetchHold
from scheduler.pages import Capacity
from scheduler.rates import Rates
from scheduler.req import Req, ReqState
from scheduler.request_table import RequestTable
from wire.stages import RequestStage


class FetchTable:
    """The operations of a fetch. Called on the scheduler's thread."""

    def __init__(self, requests: RequestTable, admission: BatchAdmission, rates: Rates) -> None:
        self._requests = requests
        self._rates = rates
        self._fetches = requests.fetches
        self._admission = admission
        self._page_size = requests.pages.page_size

    def usable(self, req: Req, tokens: int) -> int:
        """How many of the request's first `tokens` tokens may come from elsewhere: whole pages, and at least
        the last token of all is computed here. 0 for a request that computes its whole prompt."""
        if req.needs_all or self._requests.pages.memory.config.prefix_cache != "radix":
            return 0
        known = req.prompt_len + len(req.output_ids)
        return min(tokens, known - 1) // self._page_size * self._page_size

    def missing(self, req: Req, tokens: int) -> int:
        """Of the first `tokens` tokens, how many would have to be computed here."""
        return self._fetches.missing(req, tokens)

    def compute_s(self, tokens: int) -> float | None:
        """Seconds that computing that many tokens of a prompt should take; None before the first forward."""
        rate = self._rates.prefill_tokens_per_s
        return tokens / rate if rate else None

    def enter(self, req: Req, fetch: bool) -> None:
        """Queue a live request when its grammar is compiled, or with `fetch` after `go_on`."""
        requests, lower = self._requests, self._requests.pages.lower
        if fetch:
            req.state = ReqState.FETCHING
            req.stamp(RequestStage.PEER_FETCH)
            requests.fetching.append(req)
            return
        req.stamp(RequestStage.PREFILL_WAITING)
        lower.prefetch(req, requests.pages.key(req, req.prefill_len - 1))
        requests.compiling.append(req)
        requests.queue_compiled()

    def reserve(self, req: Req, tokens: int) -> FetchHold | None:
        """Take pages for what is missing of the first `tokens` tokens. None when what admitted requests will
        need, and what waits for memory, would not stay free besides."""
        promised = self._admission.promised()
        free = self._requests.pages.free_tokens()
        spare = free - self._admission.headroom()
        return self._fetches.reserve(req, tokens, Capacity(spare, promised.window_pages))

    def filled(self, hold: FetchHold, pages: int) -> dict[str, npt.NDArray[np.int64]]:
        """By group, those of the reserved pages that a prefix of `pages` pages fills."""
        return self._fetches.filled(hold, pages)

    def commit(self, hold: FetchHold, pages: int) -> int:
        """The first `pages` pages of the prompt are complete, and nobody writes them any more: they enter the
        tree, unlocked. Returns how many tokens need not be computed because of them."""
        return self._fetches.commit(hold, pages)

    def give_up(self, hold: FetchHold) -> GroupPages:
        """Nothing of the fetch is used. Returns its pages, which are still allocated: they belong in
        `memory.quarantine` until the transport's fence has passed."""
        return self._fetches.give_up(hold)

    def go_on(self, req: Req) -> None:
        """Queue a request whose fetch is over, unless the request is over, too."""
        if req.state is ReqState.FETCHING:
            self._requests.fetching.remove(req)
            req.state = ReqState.NEW
            self.enter(req, fetch=False)
