"""Pages that were freed while a launched forward can still touch them."""

from __future__ import annotations

from collections import deque

import numpy as np
import numpy.typing as npt

from kvcache.allocator import BaseTokenToKVPoolAllocator


class DeferredFrees:
    """Frees wait here until the last forward that can touch them has given its result.

    Forwards run in launch order, so for the engine alone an early reuse would be harmless. It is not for
    remote writers: a page offered to a peer must not be written by a forward launched before.
    """

    def __init__(self, allocator: BaseTokenToKVPoolAllocator) -> None:
        self._allocator = allocator
        self._held: deque[tuple[int, npt.NDArray[np.int32]]] = deque()

    def hold(self, pages: npt.NDArray[np.int32], launch: int) -> None:
        """Free `pages` once forward number `launch` has landed. Numbers given here never fall."""
        if len(pages):
            self._held.append((launch, pages))

    def landed(self, launch: int) -> None:
        """The result of forward number `launch` is here: so are those of all before it."""
        while self._held and self._held[0][0] <= launch:
            self._allocator.free_page_ids(self._held.popleft()[1])

    def pages(self) -> npt.NDArray[np.int32]:
        """All that still wait."""
        return np.concatenate([np.empty(0, np.int32), *(pages for _, pages in self._held)])
