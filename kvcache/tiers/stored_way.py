"""What storage has of a prompt: public pages, and then the tenant's own.

    tree      |-- public --|-- own --|
    storage                |-- public ----------|-- own --|      begins behind the tree's public pages
                                     |-- own ------|             begins behind all that the tree has

A page lies there under its public name, under its owner's, or under both (kvcache/storage/keys.py). One
worker may have made pages public that are still private on another, so where tenants share, both names are
looked for. The longer way is read. Of two that are equally long it is the one with less to read, and of two
that are alike in that, too, the public one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from kvcache.storage.keys import StorageKeys
from kvcache.tiers.agreement import Presence
from kvcache.tiers.host_parts import HostPart
from wire.page_hash import PageDigest

_There = Mapping[str, npt.NDArray[np.bool_]]


class StoredWay(NamedTuple):
    """The pages [start, end) of a prompt: those before page `public` under their public names."""

    start: int
    public: int
    end: int


@dataclass(frozen=True, slots=True)
class Begins:
    """Where ways through storage may begin, in pages: what is before lies in the tree."""

    own: int  # behind all that the tree has of the key
    public: int  # behind the public pages that the tree has of it

    @property
    def first(self) -> int:
        """The first page that is asked for."""
        return min(self.own, self.public)


class StoredNames:
    """The names of a prompt's pages from `begins.first` on."""

    def __init__(
        self,
        keys: StorageKeys,
        groups: Sequence[str],
        digests: Sequence[PageDigest],
        begins: Begins,
        tenant: str,
        public_pages: int,
    ) -> None:
        """`digests` are those of all pages of the prompt. Its tenant uses public pages, too, among the first
        `public_pages`."""
        asked = digests[begins.first :]
        self.begins = begins
        self.groups = groups
        self._pages = len(digests)
        self._public = {g: keys.keys(g, asked) for g in groups} if public_pages > begins.first else None
        self._public_pages = public_pages
        self._own = {g: keys.keys(g, asked, tenant) for g in groups} if tenant else None

    def asked(self) -> dict[str, list[bytes]]:
        """All names, by group: the public ones first."""
        first, last = self._public or {}, self._own or {}
        return {group: [*first.get(group, ()), *last.get(group, ())] for group in first or last}

    def names(self, way: StoredWay) -> dict[str, list[bytes]]:
        """The name of each page of a way, by group."""
        skipped = self.begins.first
        start, border, end = (page - skipped for page in way)
        public, own = self._public or {}, self._own or {}
        return {
            group: [*public.get(group, [])[start:border], *own.get(group, [])[border:end]]
            for group in public or own
        }

    def way(self, there: Presence, parts: Mapping[str, HostPart]) -> StoredWay:
        """The way to read: of `there`, which says of each asked name whether storage has it. It is empty if
        nothing that it has is of use."""
        first, total = self.begins.first, self._pages
        pages = total - first
        none = {group: np.zeros(pages, np.bool_) for group in there}
        public = {group: has[:pages] for group, has in there.items()} if self._public is not None else none
        own = {group: has[-pages:] for group, has in there.items()} if self._own is not None else none
        primary, begins = next(iter(parts)), self.begins
        missing = np.flatnonzero(~public[primary][begins.public - first :])
        border = begins.public + int(missing[0]) if len(missing) else total
        border = min(border, max(self._public_pages, begins.public))
        found = [StoredWay(begins.own, begins.own, begins.own)]
        for start, until in ((begins.own, begins.own), (begins.public, border)):
            if until >= begins.own:  # else it would be a second way to own pages that the tree has
                begin, turn = start - first, until - first
                named = {g: np.concatenate([public[g][begin:turn], own[g][turn:]]) for g in there}
                more = usable(named, parts, start)
                found.append(StoredWay(start, min(until, start + more), start + more))
        best = max(found, key=lambda way: (way.end, way.start, way.public))
        return best if best.end > begins.own else found[0]


def usable(there: _There, parts: Mapping[str, HostPart], start: int) -> int:
    """How many of the pages that were asked for, from the first on, a forward can continue from. The first of
    `parts` is the primary group's."""
    primary, *others = parts
    missing = np.flatnonzero(~there[primary])
    most = int(missing[0]) if len(missing) else len(there[primary])
    for pages in range(most, 0, -1):
        if all(_continues(there[group][:pages], parts[group], start, pages) for group in others):
            return pages
    return 0


def _continues(there: np.ndarray, part: HostPart, start: int, pages: int) -> bool:
    """Whether storage has what a group needs at the end of `pages` pages. What it needs from before `start`
    the tree has."""
    if not part.is_by_page:
        return bool(there[-1])
    needed = part.needed(start + pages)
    return bool(there[max(0, needed.start - start) :].all())
