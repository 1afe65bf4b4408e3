"""RunningBatch: the requests that decode, as arrays that change by what a step changes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from engine.batch import UNKNOWN_TOKEN
from engine.sampling_state import SamplingState
from scheduler.batch_states import BatchStates
from scheduler.req import Req


class RunningBatch:
    """A structure of arrays over the requests that decode one token in every step.

    The arrays are kept from step to step: building them anew would cost a Python loop over all requests per
    token. Batch index i belongs to `reqs[i]`. When a request leaves, the last one takes its index; no other
    request moves.
    """

    def __init__(
        self, capacity: int, max_context_len: int, page_size: int, track_interval: int | None = None
    ) -> None:
        """`track_interval`: tokens between a request's checkpoints, for a model with a state group."""
        self.page_size = page_size
        self.reqs: list[Req] = []
        self.sampling: list[SamplingState] = []
        self.rows = np.zeros(capacity, dtype=np.int32)  # req_to_token rows
        self.lens = np.zeros(capacity, dtype=np.int64)  # scheduled context = position of the next token
        self.prompt_lens = np.zeros(capacity, dtype=np.int64)
        self.limits = np.zeros(capacity, dtype=np.int64)  # limit_len
        self.next_ids = np.zeros(capacity, dtype=np.int64)  # input of the next step, or UNKNOWN_TOKEN
        self.page_table = np.zeros((capacity, -(-max_context_len // page_size)), dtype=np.int32)
        self.states = BatchStates(capacity, track_interval) if track_interval else None
        self._indices = np.arange(capacity)

    def __len__(self) -> int:
        return len(self.reqs)

    def join(self, req: Req, slots: npt.NDArray[np.integer]) -> None:
        """Add a request. `slots` are those of its scheduled context, in order."""
        assert req.req_pool_idx is not None
        index = len(self.reqs)
        self.reqs.append(req)
        self.sampling.append(req.sampling)
        req.running_index = index
        self.rows[index] = req.req_pool_idx
        self.lens[index] = req.scheduled_len
        self.prompt_lens[index] = req.prompt_len
        self.limits[index] = req.limit_len
        tokens = req.fill_ids
        known = len(tokens) > req.scheduled_len
        self.next_ids[index] = tokens[req.scheduled_len] if known else UNKNOWN_TOKEN
        self.page_table[index] = 0
        self.set_pages(req, slots)
        if self.states is not None:
            self.states.join(req)

    def set_pages(self, req: Req, slots: npt.NDArray[np.integer]) -> None:
        """The request's first len(slots) tokens now lie in these slots."""
        pages = slots[:: self.page_size] // self.page_size
        self.page_table[req.running_index, : len(pages)] = pages

    def leave(self, req: Req) -> None:
        """Remove a request."""
        index, last = req.running_index, len(self.reqs) - 1
        assert self.reqs[index] is req, f"room {req.room} is not running"
        if index != last:
            moved = self.reqs[index] = self.reqs[last]
            moved.running_index = index
            self.sampling[index] = self.sampling[last]
            for array in (self.rows, self.lens, self.prompt_lens, self.limits, self.next_ids):
                array[index] = array[last]
            self.page_table[index] = self.page_table[last]
        if self.states is not None:
            self.states.leave(req, index, last)
        self.reqs.pop()
        self.sampling.pop()
        req.running_index = -1

    def learn(self, req: Req, length: int, token: int) -> None:
        """A result has been taken: `token` stands at position `length` of the request's context."""
        if self.lens[req.running_index] == length:
            self.next_ids[req.running_index] = token

    def at_page_border(self) -> npt.NDArray[np.intp]:
        """Batch indices of the requests whose next token opens a new page."""
        return np.flatnonzero(self.lens[: len(self.reqs)] % self.page_size == 0)

    def indices(self) -> npt.NDArray[np.intp]:
        """All batch indices in use, as an array."""
        return self._indices[: len(self.reqs)]

    def advance(self) -> None:
        """One step of the whole batch is launched. Requests whose last output it samples leave."""
        n = len(self.reqs)
        self.lens[:n] += 1
        self.next_ids[:n] = UNKNOWN_TOKEN
        if self.states is not None:
            self.states.advance(n)
        full = np.flatnonzero(self.lens[:n] + 1 >= self.limits[:n])
        for req in [self.reqs[index] for index in full.tolist()]:
            self.leave(req)
