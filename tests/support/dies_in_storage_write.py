"""Run a program so that it dies while it stores a page:
`python -m tests.support.dies_in_storage_write COUNT PLACE MODULE ...`.

The process kills itself (SIGKILL) in the COUNTth write of a page into a file:

    half      half of the page's bytes are written, under the temporary name
    whole     all of them, and on the disk where that is configured, still under the temporary name
    linked    the page has its name, and nobody was told
"""

from __future__ import annotations

import itertools
import os
import runpy
import signal
import sys
from typing import Any

from kvcache.storage import file_io
from kvcache.storage.blob_store import SealedBlob
from kvcache.storage.file_io import KernelFiles
from kvcache.storage.file_store import FileStore


def die_in(place: str, count: int) -> None:
    """Patch this process."""
    numbers = itertools.count(1)
    write_all, write, write_file = file_io._write_all, KernelFiles.write, FileStore._write_file

    def dies_at(here: str) -> bool:
        return place == here and next(numbers) == count

    def half(descriptor: int, parts: list[memoryview]) -> None:
        if dies_at("half"):
            write_all(descriptor, [parts[0][: parts[0].nbytes // 2]])
            die()
        write_all(descriptor, parts)

    def whole(files: KernelFiles, path: str, blob: SealedBlob) -> None:
        write(files, path, blob)
        if dies_at("whole"):
            die()

    def linked(store: FileStore, *arguments: Any) -> None:
        write_file(store, *arguments)
        if dies_at("linked"):
            die()

    file_io._write_all = half
    KernelFiles.write = whole  # type: ignore[method-assign]
    FileStore._write_file = linked  # type: ignore[method-assign]


def die() -> None:
    """As by the kernel when memory is short."""
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()  # this thread may go on for a moment


def main() -> None:
    """Patch, then run the module as if it had been started itself."""
    count, place, module, *arguments = sys.argv[1:]
    die_in(place, int(count))
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
