"""Faults: what the network does to the messages of each process now."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

ROLES = ("router", "P", "D", "directory")
STRANGER = "?"  # whoever listens without being behind the network, such as the test itself


def role_of(name: str) -> str:
    """The role in a process's name, such as P in "P/0"."""
    return name.partition("/")[0]


@dataclass(frozen=True)
class Loss:
    """Shares of the messages that are dropped, doubled, delayed (and so reordered)."""

    drop: float = 0.04
    double: float = 0.3
    delay: float = 0.5
    longest_delay_s: float = 0.06


class Faults:
    """Named processes' faults, and how many messages of each role were disturbed."""

    def __init__(self, seed: int) -> None:
        self.disturbed: Counter[str] = Counter()
        self._rng = random.Random(seed)
        self._cut: set[frozenset[str]] = set()
        self._lossy: dict[str, Loss] = {}
        self._slow: dict[str, float] = {}
        self._loss_of_all: Loss | None = None

    def cut(self, one: str, other: str) -> None:
        """Nothing passes between two processes, in either direction, on any plane."""
        self._cut.add(frozenset((one, other)))

    def lose(self, name: str, loss: Loss | None = None) -> None:
        """Drop, double and delay what the process sends and what it is sent."""
        self._lossy[name] = loss or Loss()

    def lose_all(self, loss: Loss | None = None) -> None:
        """As `lose`, for every process behind the network."""
        self._loss_of_all = loss or Loss()

    def slow(self, name: str, delay_s: float) -> None:
        """Everything that the process sends, and that it is sent, arrives so much later."""
        self._slow[name] = delay_s

    def heal(self) -> None:
        """No faults from now on. What was cut goes on where it stopped, as far as it is still connected."""
        self._cut.clear()
        self._lossy.clear()
        self._slow.clear()
        self._loss_of_all = None

    def is_cut(self, one: str, other: str) -> bool:
        """Whether nothing passes between the two."""
        return bool(self._cut) and frozenset((one, other)) in self._cut

    def count(self, sender: str, messages: int) -> None:
        """Messages of this process were disturbed."""
        self.disturbed[role_of(sender)] += messages

    def delays(self, sender: str, receiver: str, messages: int) -> list[float]:
        """When to deliver a frame: seconds from now, once for each copy; [] drops it."""
        if not (self._lossy or self._slow or self._loss_of_all) or STRANGER in (sender, receiver):
            return [0.0]
        later_s = max(self._slow.get(sender, 0.0), self._slow.get(receiver, 0.0))
        loss = self._lossy.get(sender) or self._lossy.get(receiver) or self._loss_of_all
        delays = [later_s]
        if loss is not None:
            delays = [later_s + late for late in self._lossy_delays(loss)]
        if delays != [0.0]:
            self.disturbed[role_of(sender)] += messages
        return delays

    def stream_delay(self, sender: str, receiver: str) -> float:
        """Seconds by which a piece of a byte stream is late: of TCP, nothing else can be lost or doubled."""
        later_s = max(self._slow.get(sender, 0.0), self._slow.get(receiver, 0.0))
        loss = self._lossy.get(sender) or self._lossy.get(receiver) or self._loss_of_all
        if loss is not None and self._rng.random() < loss.delay:
            later_s += self._rng.random() * loss.longest_delay_s
        if later_s:
            self.disturbed[role_of(sender)] += 1
        return later_s

    def _lossy_delays(self, loss: Loss) -> list[float]:
        if self._rng.random() < loss.drop:
            return []
        copies = 1 + (self._rng.random() < loss.double)
        return [
            self._rng.random() * loss.longest_delay_s if self._rng.random() < loss.delay else 0.0
            for _ in range(copies)
        ]
