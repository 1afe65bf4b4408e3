"""What the process that programs are forked from imports and computes once, for all of them.

These imports are most of the processor time of a worker that serves a tiny model, five seconds, and of a
router, one second, which hundreds of them in a run of the tests would take each. Another half second of each
worker was transformers' table of the renamed weights of all models, and a collection of garbage among what
was imported.
"""

# ruff: noqa: F401

from __future__ import annotations

import gc

import tiktoken
import transformers.models.qwen3.modeling_qwen3  # what the programs import late
import uvicorn
import uvloop
from transformers.conversion_mapping import get_checkpoint_conversion_mapping

import decode_node.worker
import engine.cpu.op
import prefill_node.worker
import router.admin_listener
import router.api.app
import router.directory.server
import router.processes
import worker.main

get_checkpoint_conversion_mapping("qwen3")
gc.collect()
gc.freeze()
