"""The signatures that our calls of FlashInfer are bound to are FlashInfer's own."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path

import pytest

from tests.support.flashinfer_record import RECORDS, read, recorded_version, signature

LOCK = Path(__file__).parents[2] / "deploy" / "docker" / "cuda.lock"


def test_the_recorded_version_is_the_one_that_gpu_nodes_install() -> None:
    assert f"flashinfer-python=={recorded_version()}\n" in LOCK.read_text()


def test_the_record_is_what_the_package_says() -> None:
    """Compared where FlashInfer is installed, or where BATON_FLASHINFER names an unpacked wheel."""
    spec = importlib.util.find_spec("flashinfer")
    unpacked = os.environ.get("BATON_FLASHINFER")
    recorded = json.loads((RECORDS / f"{recorded_version()}.json").read_text())
    if spec is None and unpacked is None:
        assert recorded["BatchPrefillWithPagedKVCacheWrapper"]["plan"]
        return
    root = Path(unpacked) if unpacked else Path(str(spec and spec.origin)).parents[1]
    assert json.loads(json.dumps(read(root))) == recorded


def test_a_name_that_flashinfer_does_not_have_is_refused() -> None:
    plan = signature("BatchMLAPagedAttentionWrapper", "plan")
    with pytest.raises(TypeError, match="qo_offsets"):
        plan.bind(qo_offsets=None)
