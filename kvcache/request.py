"""What the cache needs of a request, whoever schedules it."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

from kvcache.radix_key import Namespace
from kvcache.tree_node import TreeNode

NO_SLOTS: npt.NDArray[np.int64] = np.empty(0, np.int64)


class CachedRequest(Protocol):
    """A request with a place in memory. Lengths are tokens:

    0 .. cache_protected_len .. kv_committed_len .. kv_allocated_len
         in the tree, locked    KV is valid         has slots
    """

    req_pool_idx: int | None
    kv_committed_len: int
    kv_allocated_len: int
    prefix_indices: npt.NDArray[np.int64]  # slots whose KV the next forward need not compute
    cache_protected_len: int  # whole pages
    last_node: TreeNode | None  # locked on behalf of this request
    namespace: Namespace
    tenant: str
    priority: int

    @property
    def fill_ids(self) -> npt.NDArray[np.int32]:
        """Prompt and outputs so far."""
        ...
