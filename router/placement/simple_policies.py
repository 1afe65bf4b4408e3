"""Policies that ignore what workers hold: P and D are picked apart, by one rule."""

from __future__ import annotations

from abc import abstractmethod

from router.placement.policy import Ask, Picked, Policy, RoleCandidates


class SimplePolicy(Policy):
    """Base: D first; it goes alone when there is no P, or when little is left to compute on it."""

    def pick(self, ask: Ask, prefill: RoleCandidates, decode: RoleCandidates) -> Picked:
        """See Policy."""
        d = self.pick_decode(decode)
        if len(prefill.rows) == 0 or self.left(ask, decode)[d] <= self.alone_tokens:
            return Picked(d, None)
        return Picked(d, self.pick_prefill(prefill))

    @abstractmethod
    def pick_prefill(self, side: RoleCandidates) -> int:
        """A row."""

    @abstractmethod
    def pick_decode(self, side: RoleCandidates) -> int:
        """A row."""


class RoundRobin(SimplePolicy):
    """Each in turn."""

    _next_prefill = 0
    _next_decode = 0

    def pick_prefill(self, side: RoleCandidates) -> int:
        """See SimplePolicy."""
        self._next_prefill += 1
        return (self._next_prefill - 1) % len(side.rows)

    def pick_decode(self, side: RoleCandidates) -> int:
        """See SimplePolicy."""
        self._next_decode += 1
        return (self._next_decode - 1) % len(side.rows)


class LeastLoaded(SimplePolicy):
    """The P with the fewest queued prefill tokens, the D with the fewest requests."""

    def pick_prefill(self, side: RoleCandidates) -> int:
        """See SimplePolicy."""
        return self.cheapest(side.rows.queued)

    def pick_decode(self, side: RoleCandidates) -> int:
        """See SimplePolicy."""
        return self.cheapest(side.rows.requests)


class Random(SimplePolicy):
    """Any one."""

    def pick_prefill(self, side: RoleCandidates) -> int:
        """See SimplePolicy."""
        return self.chance.randrange(len(side.rows))

    def pick_decode(self, side: RoleCandidates) -> int:
        """See SimplePolicy."""
        return self.chance.randrange(len(side.rows))
