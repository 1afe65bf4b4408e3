"""`python -m decode_node --options FILE.json`."""

from __future__ import annotations

import sys

from decode_node.worker import DecodeWorker
from worker.main import run_worker

if __name__ == "__main__":
    sys.exit(run_worker("decode_node", DecodeWorker))
