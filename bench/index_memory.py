"""Measures the memory of the index's pages: the growth of a new process while it is filled."""

from __future__ import annotations

import ctypes
import gc
import multiprocessing
import os
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple

from bench.index_dynamo import DynamoTree, dynamo
from bench.index_load import Form, Load, Shape
from router.index.global_index import GlobalIndex

SHAPE = Shape(sequences=6400, prefixes=160, held=416)  # four times the timed load, so that noise matters less


class Memory(NamedTuple):
    """Memory of an index, and the pages in it."""

    nbytes: int
    pages: int  # different ones
    held: int  # pages, counted per worker

    @property
    def per_page(self) -> float:
        """Bytes per different page."""
        return self.nbytes / self.pages

    @property
    def per_held_page(self) -> float:
        """Bytes per page and worker."""
        return self.nbytes / self.held


def measure(side: str) -> Memory:
    """Measure "baton" or "dynamo" in a process of its own."""
    spawn = multiprocessing.get_context("spawn")
    here, there = spawn.Pipe()
    process = spawn.Process(target=_measure, args=(there, side), daemon=True)
    process.start()
    assert here.poll(300.0), "the process that measures memory does not answer"
    measured: Memory = here.recv()
    process.join(5.0)
    return measured


def _measure(connection: Connection, side: str) -> None:
    load = Load(SHAPE)
    if side == "dynamo":
        core = dynamo()
        assert core is not None
        tree = DynamoTree(core, load)
        before = _resident()
        tree.fill()
    else:
        index = GlobalIndex()
        for worker in range(SHAPE.workers):
            index.join(f"w{worker}")
        for _, sequence, start in load.insertions():
            load.payload(sequence, start, Form.NODE)
        before = _resident()
        for worker, sequence, start in load.insertions():
            index.apply(f"w{worker}", load.payload(sequence, start, Form.NODE))
    connection.send(Memory(_resident() - before, load.different_pages(), load.blocks()))


def _resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
