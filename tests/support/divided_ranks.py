"""Run a worker whose ranks each have memory of their own on this CPU, as on GPUs, so that pages are put
together where they leave: `python -m tests.support.divided_ranks MODULE ...`.
"""

from __future__ import annotations

import runpy
import sys
from dataclasses import replace
from typing import Any

import worker.build
from kvcache.config import CacheConfig
from worker.capacity import chosen_config
from worker.options import WorkerOptions


def main() -> None:
    """Patch, then run the module as if it had been started itself."""

    def divided(options: WorkerOptions, *arguments: Any) -> CacheConfig:
        chosen = chosen_config(options, *arguments)
        return replace(chosen, rank_devices=("cpu",) * options.tp_size if options.tp_size > 1 else ())

    vars(worker.build)["chosen_config"] = divided
    _, module, *arguments = sys.argv
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
