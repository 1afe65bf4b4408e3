"""Who gives its memory back when the decode batch cannot grow."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.req import Req


def pick_victim(candidates: Iterable[Req]) -> Req:
    """The one whose return costs least: fewest outputs; of those the longest context, which frees most.

    Last come goes on equal terms, so that of two equal requests the same one always gets through.
    """
    return min(candidates, key=lambda req: (len(req.output_ids), -req.prompt_len, -req.arrival))
