"""LoadAhead: what requests near the head of the queue have on the host is loaded before their turn.

Their copies then run beside each other's and beside forwards. Nothing is admitted out of order for it: a load
takes only memory that stays free when all requests before it, and itself, are admitted; and when memory gets
short all the same, what was loaded for requests that wait gives way (Pages, LoadBacks.make_room).
"""

from __future__ import annotations

from math import inf

from kvcache.request import STATE_PAIR
from scheduler.budget import BatchAdmission
from scheduler.pages import match_len
from scheduler.request_table import RequestTable

_REQUESTS = 8  # from the head on


class LoadAhead:
    """Called on the scheduler's thread, once a step."""

    def __init__(self, requests: RequestTable, admission: BatchAdmission) -> None:
        self._requests = requests
        self._pages = requests.pages
        self._admission = admission
        self._seen: list[tuple[int, int]] = []  # the head of the queue at the last call
        self._free = 0  # tokens that could be allocated then
        self._done: set[tuple[int, int]] = set()  # those of them whose loads were begun, or are not worth it

    def begin(self) -> None:
        """Begin loads, if the head of the queue has changed or memory has become free."""
        if not self._pages.lower.is_on:
            return
        free = self._pages.free_tokens()
        has_more, self._free = free > self._free, free
        first = {(req.room, req.epoch): req for req in self._requests.waiting.first(_REQUESTS)}
        if list(first) == self._seen and not has_more:
            return
        self._seen = list(first)
        self._done &= first.keys()
        if len(self._done) == len(first):
            return
        pages, promised = self._pages, self._admission.promised()
        tokens = free - promised.tokens
        windows = inf if pages.window is None else pages.window.available_pages() - promised.window_pages
        states = inf if pages.states is None else pages.states.available_pages()
        for key, req in first.items():
            mine = pages.pages_of(req.prefill_len) - pages.lower.loaded_pages(req)
            tokens -= mine * pages.page_size
            windows -= 2 * self._admission.window_peak(req, req.prefill_len)  # the match's, and its own
            states -= STATE_PAIR + 1
            if min(tokens, windows, states) < 0:
                return
            if key not in self._done:
                self._done.add(key)
                match = pages.memory.cache.match_prefix(pages.key(req, match_len(req)))
                pages.lower.brings_ahead(req, match)
