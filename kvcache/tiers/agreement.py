"""Agreement of the ranks of one worker on a prefetch: all must enter the same pages into their trees.

Each rank has its own part of every page, and asks and reads for itself. Storage may have lost a page of one
rank only, and a read may fail or be stopped on one rank only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Presence = Mapping[str, npt.NDArray[np.bool_]]
"""By group, for each page that was asked for, in order: whether storage has it."""


@dataclass(frozen=True, slots=True)
class RankReport:
    """What one rank knows of a prefetch, or what several have agreed on."""

    there: Presence
    read: int  # pages of the primary group that have arrived, from the first one on
    is_over: bool  # nothing more is read


def agree(reports: Sequence[RankReport]) -> RankReport:
    """What holds for all ranks; `reports` has at least one, all of the same pages.

    A page is there if every rank has its part. So the number of pages that are there from the first one on is
    the minimum over the ranks, and a group whose pages may have gaps, like states, ends where every rank has
    one. Of a group that a rank says nothing of, nothing is agreed. As many pages have arrived as on the
    slowest rank. The prefetch is over once it is over on any rank.
    """
    groups = [group for group in reports[0].there if all(group in report.there for report in reports)]
    there = {group: np.logical_and.reduce([report.there[group] for report in reports]) for group in groups}
    return RankReport(there, min(report.read for report in reports), any(r.is_over for r in reports))
