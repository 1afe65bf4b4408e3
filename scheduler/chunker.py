"""Where a prefill chunk ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from scheduler.req import Req
from wire.request import Pooling


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens [start, end) of one request, computed in one forward."""

    req: Req
    start: int
    end: int
    is_last: bool  # it completes the request's prefill
    samples: bool  # it is the last, and the token that follows it is not known yet
    state_read: int = 0  # state group: slot of the state at `start`; 0 at the start of the prompt
    state_write: int = 0  # state group: slot that the state at `end` is written to

    @property
    def is_pooled(self) -> bool:
        """Whether the prompt's vector has a part in this chunk: any for a mean, the last token otherwise."""
        pooling = self.req.pooling
        return pooling is Pooling.MEAN or (pooling is Pooling.LAST and self.samples)


def page_floor(tokens: int, page_size: int) -> int:
    """The last page border at or before `tokens`."""
    return tokens - tokens % page_size


def chunk_end(start: int, total: int, budget: int, page_size: int, last_chunk: int = 0) -> int:
    """The end of the chunk that starts at `start` (a page border) of `total` tokens; `start` if none fits.

    A chunk that is not the last ends on a page border, so that all of it can be cached and sent.
    `last_chunk` > 0 keeps the last chunk at most that long, rounded up to pages: a hand-off waits for what is
    sent after the last forward.
    """
    end = total
    if total - start > budget:
        end = page_floor(start + budget, page_size)
    elif 0 < last_chunk < total - start:
        border = page_floor(total - last_chunk, page_size)
        end = border if border > start else total
    return end


def first_cut(start: int, end: int, cuts: Iterable[int]) -> int:
    """Where the chunk [start, end) must end if the cache wants a forward to end at each of `cuts`."""
    return min((cut for cut in cuts if start < cut < end), default=end)
