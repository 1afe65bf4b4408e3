"""What workers hold of a tenant's prompt where tenants share: public pages, and then the tenant's own."""

from __future__ import annotations

import numpy as np

from router.index.global_index import GlobalIndex, Matches
from router.index.page_table import Hashes


def find_mixed(index: GlobalIndex, public: Hashes, own: Hashes) -> Matches:
    """The longest prefix on each worker that begins with public pages and goes on with the tenant's.

    `public` and `own` name the same pages.
    """
    shared = index.find(public)
    found = shared.found.copy()
    for pages in np.unique(shared.pages).tolist():
        found += np.where(shared.pages == pages, index.find(own[pages:]).found, 0)
    return Matches(found)
