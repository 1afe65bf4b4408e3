"""`python -m prefill_node --options FILE.json`."""

from __future__ import annotations

import sys

from prefill_node.worker import PrefillWorker
from worker.main import run_worker

if __name__ == "__main__":
    sys.exit(run_worker("prefill_node", PrefillWorker))
