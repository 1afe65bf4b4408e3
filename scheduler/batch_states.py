"""BatchStates: which state slots the decode batch reads and writes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler.req import Req


class BatchStates:
    """Two slots per batch index, beside RunningBatch's arrays, for a model with a state group.

    A request decodes in place: from step to step nothing changes here. It moves to its other slot where its
    present state must be kept: in its first step (the state may be the tree's, or about to be, or another
    worker may be reading it), and every `interval` tokens, as a checkpoint.
    """

    def __init__(self, capacity: int, interval: int) -> None:
        self.interval = interval
        self.reads = np.zeros(capacity, dtype=np.int32)
        self.writes = np.zeros(capacity, dtype=np.int32)
        self._fresh: list[Req] = []  # have joined since the last forward

    def join(self, req: Req) -> None:
        """The request is in the batch. Its slots are set at the next `prepare`."""
        self._fresh.append(req)

    def leave(self, req: Req, index: int, last: int) -> None:
        """The request leaves batch index `index`, which the request at `last` takes."""
        self.reads[index], self.writes[index] = self.reads[last], self.writes[last]
        if req in self._fresh:
            self._fresh.remove(req)

    def prepare(self, reqs: list[Req], lens: npt.NDArray[np.int64]) -> int:
        """The whole batch, with these context lengths, is about to be launched. Returns checkpoints kept."""
        due = [reqs[index] for index in np.flatnonzero(lens % self.interval == 0).tolist()]
        for req in dict.fromkeys((*self._fresh, *due)):
            hold, index = req.state_hold, req.running_index
            assert hold is not None, f"{req} has no state"
            self.reads[index], self.writes[index] = hold.decode(int(lens[index]), checkpoint=True)
        self._fresh.clear()
        return len(due)

    def advance(self, n: int) -> None:
        """A forward of the first `n` is launched: the next one starts from what it writes."""
        self.reads[:n] = self.writes[:n]
