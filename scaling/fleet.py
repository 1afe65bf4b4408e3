"""FleetDemand: how many workers meet both objectives, when each of them may have either role."""

from __future__ import annotations

import math

from scaling.demand import Demand
from scaling.sample import Samples


class FleetDemand:
    """The sum of what both roles need, in whole workers and at least one each. Who has which role is decided
    elsewhere (scaling/roles.py)."""

    def __init__(self, prefill: Demand, decode: Demand) -> None:
        self._prefill = prefill
        self._decode = decode

    def observe(self, samples: Samples, now: float) -> None:
        """See Demand. A worker that has just changed its role is sampled in the one that it had longer."""
        prefill = {name: one for name, one in samples.items() if one.prefills > 0.5}
        self._prefill.observe(prefill, now)
        self._decode.observe({name: one for name, one in samples.items() if name not in prefill}, now)

    def workers(self, ahead_s: float) -> float:
        """See Demand."""
        return sum(max(1, math.ceil(role.workers(ahead_s))) for role in (self._prefill, self._decode))
