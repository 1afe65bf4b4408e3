"""Arrivals: pages that a modelled worker gets other than by computing them.

They are loaded from its own host memory and storage, or fetched from another worker, before a prompt starts.
Loading takes turns on one way to the device. A fetch takes the holder's outgoing and the worker's incoming
network, as a hand-off does. The worker reserves memory first. The holder serves few fetches at once, and
refuses others and what it does not have on the device or in host memory. What would come later than it could
be computed is not fetched.
"""

from __future__ import annotations

from collections.abc import Callable

from simulator.attempt import Attempt
from simulator.clock import Clock
from simulator.link import Link
from simulator.memory import Found, WorkerMemory
from simulator.options import WorkerModel


class Arrivals:
    """Those of one worker."""

    def __init__(
        self,
        clock: Clock,
        model: WorkerModel,
        memory: WorkerMemory,
        link: Link,
        ready: Callable[[], None],
    ) -> None:
        """`memory` and `link` are the worker's. `ready` is called when a prompt's pages are here."""
        self.fetched_tokens = 0
        self.loaded_tokens = 0
        self.serving = 0  # fetches from this worker
        self.dead = False
        self.memory = memory
        self.link = link
        self._clock = clock
        self._model = model
        self._ready = ready
        self._way_free_at = 0.0

    def load(self, found: Found) -> float:
        """Begin to load what is below the device. Returns when it will be there."""
        model, now = self._model, self._clock.now
        if found.all == found.device:
            return now
        page_bytes = model.page_tokens * model.kv_bytes_per_token
        seconds = (found.host + found.storage) * page_bytes / model.load_bytes_per_s
        seconds += found.storage * page_bytes / model.storage_bytes_per_s
        self._way_free_at = max(now, self._way_free_at) + seconds
        self.loaded_tokens += (found.host + found.storage) * model.page_tokens
        return self._way_free_at

    def bring(self, attempt: Attempt, holder: Arrivals | None) -> None:
        """Begin to fetch and to load what of the prompt need not be computed.

        The attempt is `arriving` then, until `ready` is called. It is not if there is no room.
        """
        attempt.asked = True
        usable = attempt.prompt - 1  # the last token is always computed
        found, now = self.memory.find(attempt, usable), self._clock.now
        pages = found.all
        if holder is not None:
            pages = max(pages, holder._offers(attempt, usable))
        gain = (pages - found.all) * self._model.page_tokens
        end, size = now, gain * self._model.kv_bytes_per_token
        if gain:
            assert holder is not None
            end = holder.link.would_end(self.link, size, now)
            if end - now > gain / self._model.prefill_tokens_per_s:
                pages, gain = found.all, 0
        if pages == found.device or not self.memory.expect(attempt, pages):
            return
        if gain:
            assert holder is not None
            end, _ = holder.link.send(self.link, size, now)
            holder.serving += 1
            self.fetched_tokens += gain
        else:
            holder = None
        attempt.arriving = True
        self._clock.at(max(end, self.load(found)), self._arrived, attempt, pages, holder)

    def _offers(self, attempt: Attempt, usable: int) -> int:
        """The pages of a prompt that others may fetch now."""
        if self.dead or self.serving >= self._model.fetches_at_once:
            return 0
        found = self.memory.find(attempt, usable)
        return found.device + found.host if not found.storage else found.device

    def _arrived(self, attempt: Attempt, pages: int, holder: Arrivals | None) -> None:
        if holder is not None:
            holder.serving -= 1
        attempt.arriving = False
        if attempt.over or (holder is not None and holder.dead):
            self.memory.forget(attempt)
        else:
            self.memory.arrived(attempt, pages, fetched=holder is not None)
        if not self.dead:
            self._ready()
