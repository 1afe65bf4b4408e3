"""Run a worker whose ranks each have memory of their own on this CPU, as on GPUs, so that pages are put
together where they leave: `python -m tests.support.divided_ranks MODULE ...`.
"""

from __future__ import annotations

import runpy
import sys

import kvcache.memory


def main() -> None:
    """Patch, then run the module as if it had been started itself."""
    vars(kvcache.memory)["one_memory"] = lambda devices: False
    _, module, *arguments = sys.argv
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
