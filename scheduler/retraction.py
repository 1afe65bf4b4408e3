"""Which request is retracted when the decode batch cannot grow."""

from __future__ import annotations

from collections.abc import Iterable

from scheduler.req import Req


def pick_victim(candidates: Iterable[Req]) -> Req:
    """The request with the fewest outputs; of those the longest prompt, which frees most.

    Among equals the last arrival is retracted, so that of two equal requests the same one always finishes.
    """
    return min(candidates, key=lambda req: (len(req.output_ids), -req.prompt_len, -req.rank[-1]))
