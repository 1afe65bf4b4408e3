"""The pages that the workers of bench.index hold, and the events that announce them.

A sequence is a shared prefix and a suffix of its own. A worker holds some of the sequences. Its first
sequence with a prefix is inserted as one node of all pages, later ones as a node of their suffix. Batches are
encoded once; two workers that insert the same node send the same bytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from wire.events import AnyEvent, BlockRemoved, BlockStored, encode_batch
from wire.page_hash import event_hash, namespace_seed, page_digests

PAGE = 16
VOCABULARY = 100_000


class Form(StrEnum):
    """The form of the events of a node."""

    NODE = "node"  # one BlockStored with all its pages: our publisher's
    PAGE = "page"  # one BlockStored per page, in one batch: SGLang's
    EXTERNAL = "external"  # one BlockStored, with unsigned hashes of another engine: vLLM's


@dataclass(frozen=True, slots=True)
class Shape:
    """The size of the load. Sequences have `pages` pages; the first `shared` of them are the prefix."""

    workers: int = 64
    sequences: int = 1600
    prefixes: int = 40
    held: int = 104  # sequences of one worker
    pages: int = 128
    shared: int = 64


class Insertion(NamedTuple):
    """A worker inserts a sequence from page `start` on."""

    worker: int
    sequence: int
    start: int


class Load:
    """The sequences, the insertions and the batches. The same in every process."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        random = np.random.default_rng(5)
        prefixes = random.integers(0, VOCABULARY, (shape.prefixes, shape.shared * PAGE), np.int32)
        own = (shape.sequences, (shape.pages - shape.shared) * PAGE)
        suffixes = random.integers(0, VOCABULARY, own, np.int32)
        self._prefix_of = random.integers(0, shape.prefixes, shape.sequences)
        self.tokens = np.concatenate([prefixes[self._prefix_of], suffixes], axis=1)
        self.hashes = np.array([_hashes(tokens) for tokens in self.tokens], np.int64)
        self.held = np.array(
            [random.choice(shape.sequences, shape.held, replace=False) for _ in range(shape.workers)]
        )
        self.payload = cache(self._payload)  # (sequence, start, form) -> one batch

    def insertions(self) -> Iterator[Insertion]:
        """The insertions that fill all workers, in turn."""
        seen: set[tuple[int, int]] = set()
        for turn in range(self.shape.held):
            for worker in range(self.shape.workers):
                sequence = int(self.held[worker, turn])
                key = (worker, int(self._prefix_of[sequence]))
                yield Insertion(worker, sequence, self.shape.shared if key in seen else 0)
                seen.add(key)

    def blocks(self) -> int:
        """The number of pages in all insertions."""
        return sum(self.shape.pages - insertion.start for insertion in self.insertions())

    def different_pages(self) -> int:
        """The number of different pages that workers hold."""
        return len(np.unique(self.hashes[np.unique(self.held)]))

    def removal(self, sequence: int) -> bytes:
        """The batch that removes a sequence's suffix."""
        pages: list[int] = self.hashes[sequence, self.shape.shared :].tolist()
        return encode_batch(1.0, [BlockRemoved(pages, "GPU")])

    def _payload(self, sequence: int, start: int, form: Form) -> bytes:
        hashes, tokens = self.hashes[sequence], self.tokens[sequence]
        if form == Form.EXTERNAL:
            hashes = (hashes ^ np.int64(0x5555)).astype(np.uint64)
        pages, ids = hashes.tolist(), tokens.tolist()
        step = 1 if form == Form.PAGE else self.shape.pages - start
        events: list[AnyEvent] = [
            BlockStored(
                pages[at : at + step], pages[at - 1] if at else None, ids[at * PAGE : (at + step) * PAGE],
                PAGE, None, "GPU", None,
            )
            for at in range(start, self.shape.pages, step)
        ]  # fmt: skip
        return encode_batch(1.0, events)


def _hashes(tokens: npt.NDArray[np.int32]) -> list[int]:
    return [event_hash(digest) for digest in page_digests(namespace_seed("bench"), tokens.tobytes(), PAGE)]
