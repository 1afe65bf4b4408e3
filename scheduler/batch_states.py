"""BatchStates: which state slots the lanes of the decode batch read and write."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from scheduler.req import Req


class BatchStates:
    """Two slots per lane, beside RunningBatch's arrays, for a model with a state group.

    A lane decodes in place: nothing changes from step to step. It moves to its request's other slot where the
    state that it stands on is to stay: in its first step (that state may be the tree's, or on its way there,
    or another worker's to fetch), and at every `interval` tokens, as a checkpoint.
    """

    def __init__(self, capacity: int, interval: int) -> None:
        self.interval = interval
        self.reads = np.zeros(capacity, dtype=np.int32)
        self.writes = np.zeros(capacity, dtype=np.int32)
        self._fresh: list[Req] = []  # joined, and not in a forward yet

    def join(self, req: Req) -> None:
        """The request is in the batch; its lane's slots are known at the next `turn`."""
        self._fresh.append(req)

    def leave(self, req: Req, lane: int, last: int) -> None:
        """The request's lane is taken by the `last` one."""
        self.reads[lane], self.writes[lane] = self.reads[last], self.writes[last]
        if req in self._fresh:
            self._fresh.remove(req)

    def turn(self, reqs: list[Req], lens: npt.NDArray[np.int64]) -> int:
        """A forward of all lanes, at these lengths, is about to be launched. Returns checkpoints kept."""
        due = [reqs[lane] for lane in np.flatnonzero(lens % self.interval == 0).tolist()]
        for req in dict.fromkeys((*self._fresh, *due)):
            hold, lane = req.state_hold, req.running_index
            assert hold is not None, f"{req} has no state"
            self.reads[lane], self.writes[lane] = hold.decode(int(lens[lane]), checkpoint=True)
        self._fresh.clear()
        return len(due)

    def advance(self, lanes: int) -> None:
        """The forward is launched: every lane goes on from what it leaves behind."""
        self.reads[:lanes] = self.writes[:lanes]
