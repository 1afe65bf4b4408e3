"""PageWrite: which page goes where."""

from __future__ import annotations

from dataclasses import dataclass

from kvcache.page_runs import PageIds


@dataclass(frozen=True, slots=True)
class PageWrite:
    """Page `src_pages[i]` of this worker's pool goes to page `dst_pages[i]` of the peer's, for one room,
    epoch and group. `on_host`: the source pages are those of the host tier.

    Both arrays are one-dimensional, of equal length and int64; a page occurs at most once in `dst_pages`.
    """

    room: int
    epoch: int
    group: str
    src_pages: PageIds
    dst_pages: PageIds
    on_host: bool = False

    def __post_init__(self) -> None:
        assert self.src_pages.shape == self.dst_pages.shape, "a page write pairs every source with a target"
        assert self.src_pages.ndim == 1, "page ids are one-dimensional"

    def __len__(self) -> int:
        return len(self.src_pages)
