"""The state slots of the decode batch go with their requests."""

from __future__ import annotations

from unittest.mock import Mock

import numpy as np

from kvcache.request import StateHold
from scheduler.batch_states import BatchStates
from scheduler.req import Req


def request(index: int, slots: tuple[int, int]) -> Mock:
    """A request at `index` of the batch that reads and writes `slots` next."""
    hold = Mock(spec=StateHold)
    hold.decode.return_value = slots
    return Mock(spec=Req, running_index=index, state_hold=hold)


def test_a_request_that_takes_the_place_of_another_brings_its_slots() -> None:
    states = BatchStates(capacity=4, interval=8)
    reqs: list[Req] = [request(0, (1, 2)), request(1, (3, 4)), request(2, (5, 6))]
    for req in reqs:
        states.join(req)
    states.prepare(reqs, np.array([3, 5, 7]))
    states.leave(reqs[0], 0, 2)
    assert (states.reads[:2].tolist(), states.writes[:2].tolist()) == ([5, 3], [6, 4])
    states.advance(2)
    assert states.reads[:2].tolist() == [6, 4]


def test_a_request_that_leaves_before_its_first_step_moves_to_no_slot() -> None:
    states = BatchStates(capacity=4, interval=8)
    gone, stays = request(0, (1, 2)), request(0, (3, 4))
    states.join(gone)
    states.join(stays)
    states.leave(gone, 0, 1)
    states.prepare([stays], np.array([5]))
    assert not gone.state_hold.decode.called
    assert (states.reads[0], states.writes[0]) == (3, 4)
