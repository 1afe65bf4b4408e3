"""What only the garbage collector would free."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def left_over(*packages: str) -> Iterator[list[object]]:
    """Filled at the end with these packages' objects that were made inside and are garbage in cycles."""
    found: list[object] = []
    gc.disable()
    gc.freeze()  # what is older: another test's garbage may become so only now
    try:
        yield found
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        found += [one for one in gc.garbage if type(one).__module__.partition(".")[0] in packages]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.unfreeze()
        gc.enable()
