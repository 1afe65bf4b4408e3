"""RoleController: which of a fixed number of workers prefill, and which decode."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from scaling.demand import Demand
from scaling.sample import Samples


@dataclass(frozen=True, slots=True)
class Switch:
    """Workers that are to drain, and to begin again with the other role."""

    to_prefill: tuple[str, ...] = ()
    to_decode: tuple[str, ...] = ()


class RoleController:
    """It gives both roles the same pressure: the workers that a role needs over those that it has.

    Switching costs a drain. So it waits until the present pressure is above `STRAINED` and `GAIN` times the
    best one, and at most `AT_ONCE` of all workers switch at a time. They count for their new role. Each role
    keeps one worker. The least loaded workers of a role switch, because they drain soonest.
    """

    STRAINED = 0.7
    GAIN = 1.3
    AT_ONCE = 0.5
    MEMORY_S = 20.0  # of the forecasts: a switch takes seconds, so it need not look far ahead

    def __init__(self, prefill: Demand, decode: Demand, ahead_s: float) -> None:
        """`ahead_s`: how long a switch takes, about. The needs of then decide."""
        self._prefill = prefill
        self._decode = decode
        self._ahead_s = ahead_s

    def switch(self, prefill: Samples, decode: Samples, switching: AbstractSet[str], now: float) -> Switch:
        """The workers that should switch. Those in `switching` do so already, and are sampled in their old
        role until they have drained."""
        self._prefill.observe(prefill, now)
        self._decode.observe(decode, now)
        needs = self._prefill.workers(self._ahead_s), self._decode.workers(self._ahead_s)
        total = len(prefill) + len(decode)
        here = len(prefill.keys() - switching) + len(decode.keys() & switching)
        free = max(1, int(self.AT_ONCE * total)) - len(switching)
        if free <= 0 or not 0 < here < total:
            return Switch()
        pressures = {count: _pressure(needs, count, total - count) for count in range(1, total)}
        best = min(pressures, key=lambda count: (pressures[count], abs(count - here)))
        if pressures[here] < max(self.STRAINED, self.GAIN * pressures[best]):
            return Switch()
        many = min(abs(best - here), free)
        if best > here:
            rows = {name: one.rows for name, one in decode.items() if name not in switching}
            return Switch(to_prefill=_idlest(rows, many))
        queues = {name: one.queued_tokens for name, one in prefill.items() if name not in switching}
        return Switch(to_decode=_idlest(queues, many))


def _pressure(needs: tuple[float, float], prefill: int, decode: int) -> float:
    return max(needs[0] / prefill, needs[1] / decode)


def _idlest(loads: Mapping[str, float], many: int) -> tuple[str, ...]:
    return tuple(sorted(loads, key=lambda name: (loads[name], name))[:many])
