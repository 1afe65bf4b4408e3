"""Cases of the oracles over tiers: each family with each pair of policies, both with all else."""

from __future__ import annotations

from collections.abc import Collection
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvcache.tiers.config import PREFETCH_POLICIES, WRITE_POLICIES
from tests.support.conversations import small
from tests.support.oracle import EVERY, covering

POLICIES = list(product(WRITE_POLICIES, PREFETCH_POLICIES))


class TierCase(NamedTuple):
    """A family, and how it is served."""

    family: str
    policies: tuple[str, str]  # of writes to the host, and of reads from storage
    split: bool
    page_size: int
    chunk: int | None
    host_ratio: float
    together: bool  # all conversations at once, or in turn

    def __str__(self) -> str:
        place, order = "apart" if self.split else "colocated", "together" if self.together else "in-turn"
        how = f"page{self.page_size}-chunk{self.chunk}-host{self.host_ratio:.0f}"
        return f"{self.family}-{'-'.join(self.policies)}-{place}-{how}-{order}"

    @property
    def ask_times(self) -> int:
        """How often a prompt is asked until all of it is on the host."""
        return ask_times(self.policies[0])

    def options(self, path: Path, storage: Path, **more: Any) -> dict[str, Any]:
        """Of both workers."""
        write, prefetch = self.policies
        return small(
            path,
            storage,
            page_size=self.page_size,
            chunked_prefill_size=self.chunk,
            hicache_ratio=self.host_ratio,
            hicache_write_policy=write,
            hicache_storage_prefetch_policy=prefetch,
            **more,
        )


def ask_times(write: str) -> int:
    """As TierCase.ask_times."""
    return 2 if write == "write_through_selective" else 1


def tier_cases(in_make_test: Collection[tuple[str, tuple[str, str]]]) -> list[Any]:
    """`in_make_test`: families and their policies of which one case is in `make test`.

    A family's cases follow each other: its answers are computed once.
    """
    rows: list[Any] = covering(
        [EVERY, POLICIES, (True, False), (4, 16), (24, None), (8.0, 1.0), (True, False)]
    )
    marked, quick = [], set(in_make_test)
    for row in sorted(rows, key=lambda row: EVERY.index(row[0])):
        case = TierCase(*row)
        mark = pytest.mark.oracle if case[:2] in quick else pytest.mark.oracle_full
        quick.discard(case[:2])
        marked.append(pytest.param(case, id=str(case), marks=mark))
    return marked
