"""Balance: who owns each page of a group, counted piece by piece.

A check of a large tree takes seconds. It is therefore a generator, which does a bounded part of the work
between two `yield`s, so that a worker can look for requests in between (worker/idle_check.py).
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from kvcache.tree_node import TreeNode

SLICE_NODES = 512
"""Nodes of the tree between two `yield`s: 2 to 3 ms."""
SLICE_PAGES = 1 << 16
"""Pages between two `yield`s: below 1 ms. The last node of a slice may have more."""

Numbers = npt.NDArray[np.integer]
T = TypeVar("T")


class OutOfBalance(AssertionError):
    """Pages of a group (or rows: `of` is "rows") have no owner or two. `numbers` are theirs."""

    def __init__(self, of: str, numbers: Numbers, message: str) -> None:
        super().__init__(message)
        self.of = of
        self.numbers = numbers


class Balance:
    """Asserts that every number in 1..count has exactly one owner. `of` is a group, or "rows"."""

    def __init__(self, of: str, count: int, what: str) -> None:
        self._of = of
        self._what = what
        self._count = count
        self._times = np.zeros(count + 1, np.uint8)
        self._pieces: dict[str, list[Numbers]] = {}

    def size(self, owner: str) -> int:
        """How many numbers `owner` has."""
        return sum(map(len, self._pieces.get(owner, ())))

    def add(self, owner: str, numbers: Numbers) -> Iterator[None]:
        """`owner` has these numbers. They must not change before `check`."""
        self._pieces.setdefault(owner, []).append(numbers)
        for start in range(0, len(numbers), SLICE_PAGES):
            piece = numbers[start : start + SLICE_PAGES].astype(np.intp)
            assert piece.max() <= self._count, f"a {self._what} beyond {self._count}: {self._sizes()}"
            assert piece.min() > 0, f"{self._what} 0 is nobody's: {self._sizes()}"
            np.add.at(self._times, piece, 1)
            if start + SLICE_PAGES < len(numbers):
                yield

    def check(self) -> Iterator[None]:
        """Raises OutOfBalance when a number has no owner, or more than one."""
        for start in range(1, self._count + 1, SLICE_PAGES):
            if (self._times[start : start + SLICE_PAGES] != 1).any():
                self._fail()
            yield

    def _sizes(self) -> dict[str, int]:
        return {owner: self.size(owner) for owner in self._pieces}

    def _fail(self) -> None:
        lost = np.flatnonzero(self._times[1:] == 0) + 1
        end = f"of {self._count}: {self._sizes()}"
        if len(lost):
            message = f"{len(lost)} {self._what}s lost, first {lost[:8].tolist()}; {end}"
            raise OutOfBalance(self._of, lost, message)
        shared = np.flatnonzero(self._times > 1)
        owners = {
            owner: shared[np.isin(shared, np.concatenate(pieces))][:8].tolist()
            for owner, pieces in self._pieces.items()
        }
        raise OutOfBalance(self._of, shared, f"{len(shared)} {self._what}s owned twice, {owners}; {end}")


def in_slices(nodes: Iterable[TreeNode]) -> Iterator[Sequence[TreeNode]]:
    """The nodes, as many at a time as may come between two `yield`s."""
    batch: list[TreeNode] = []
    pages = 0
    for node in nodes:
        batch.append(node)
        pages += node.num_pages
        if len(batch) >= SLICE_NODES or pages >= SLICE_PAGES:
            yield batch
            batch, pages = [], 0
    yield batch


def run_through(steps: Generator[None, None, T]) -> T:
    """Run a check in one go; returns what it returns."""
    while True:
        try:
            next(steps)
        except StopIteration as end:
            result: T = end.value
            return result
