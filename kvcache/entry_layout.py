"""EntryGroupSpec: pages whose layers differ in the width of their rows and in the tokens of a row.

DeepSeek-V4 has two groups of this kind. A layer of compressed attention sums up every few tokens in one
*entry*, and its queries attend to entries; these are the primary group. Beside them all layers attend to the
last tokens themselves. Those are the window group, and what an unfinished entry will be made of is in it,
too: an entry needs no more tokens than the window holds.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from common.errors import ConfigError
from kvcache.layout import GroupSpec, group_layout
from kvcache.quant import KVFormat
from wire.records import GroupLayout


class LayerRows(NamedTuple):
    """The rows of one layer: `width` values each, and a row for every `tokens` tokens."""

    layer: int
    width: int
    tokens: int = 1

    def of_page(self, page_size: int) -> int:
        """Rows of one page. Where a row stands for more tokens than a page has, a page has room for one: the
        row is in the page of its last token.

        Raises ConfigError if a row may begin and end within different parts of pages.
        """
        if page_size % self.tokens and self.tokens % page_size:
            raise ConfigError(
                "page_size",
                f"pages of {page_size} tokens and entries of {self.tokens} tokens do not divide each other",
                "use another power of two",
            )
        return max(1, page_size // self.tokens)


@dataclass(frozen=True)
class EntryGroupSpec(GroupSpec):
    """A page holds, layer after layer, `[rows, width]` of each layer. With `window` it is a window group of
    the last so many tokens, and without one the primary group.

    A token's row of DeepSeek-V4's window is 28 times as large as what it adds to entries, so that few
    windows are kept beside them.
    """

    window_ratio = 0.1

    rows: tuple[LayerRows, ...]
    dtype: torch.dtype
    name: str = "entries"
    window: int | None = None

    @property
    def kind(self) -> str:
        """ "window" or "entries"."""
        return "entries" if self.window is None else "window"

    @cached_property
    def layer_ids(self) -> tuple[int, ...]:  # type: ignore[override]
        """The layers, in order."""
        return tuple(rows.layer for rows in self.rows)

    def page_shape(self, page_size: int) -> tuple[int, ...]:
        """`[values]`."""
        return (sum(rows.of_page(page_size) * rows.width for rows in self.rows),)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page: all layers, contiguous."""
        return self.page_shape(page_size)[0] * self.dtype.itemsize

    def to_layout(self, page_size: int) -> GroupLayout:
        """The dtype names every layer's rows, so that equal layouts mean equal pages."""
        rows = ",".join(f"{layer}:{width}/{tokens}" for layer, width, tokens in self.rows)
        return group_layout(self, page_size, f"{self.dtype} {rows}".removeprefix("torch."), "plain")

    def stored_in(self, stored: KVFormat) -> EntryGroupSpec:
        if stored is not KVFormat.AUTO:
            raise ConfigError(
                "kv_cache_dtype", f"entries of compressed attention are not stored as {stored}", "use auto"
            )
        return self
