"""The tests of kernels again, with the instructions that this CPU may lack emulated: AVX512-BF16 and AMX."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from engine.cpu.op import KernelsUnavailable, machine_isas

TESTS = Path(__file__).parents[2]


def can_emulate() -> bool:
    try:
        return "avx512_vnni" in machine_isas()
    except KernelsUnavailable:
        return False


pytestmark = [
    pytest.mark.emulated,
    pytest.mark.skipif(not can_emulate(), reason="emulation needs kernels, and AVX-512 with VNNI"),
]

NEW = "avx512_bf16 or amx"
"""Selects cases that name their instruction set; those of other files run with the best one."""


@pytest.mark.parametrize(
    ("path", "cases"),
    [
        pytest.param("engine/cpu/test_linear.py", NEW, id="linear"),
        pytest.param("engine/cpu/test_int8_weights.py", NEW, id="int8_weights"),
        pytest.param("engine/cpu/test_expanded_weights.py", NEW, id="expanded_weights"),
        pytest.param("engine/cpu/test_coded_weights.py", NEW, id="coded_weights"),
        pytest.param("engine/cpu/test_attention.py", NEW, id="attention"),
        pytest.param("engine/cpu/test_quantised.py", "", id="quantised"),
        pytest.param("engine/cpu/test_decoder.py", NEW, id="decoder"),
        pytest.param("engine/cpu/test_experts.py", "best", id="experts"),
        pytest.param("engine/checkpoint/test_kept_formats.py", "", id="kept_formats"),
        pytest.param("engine/test_oracle_bfloat16.py", NEW, id="oracle_bfloat16"),
    ],
)
def test_with_emulated_instructions(path, cases):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-x", "-p", "tests.emulation.plugin", "-k", cases, TESTS / path],
        cwd=TESTS.parent,
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stdout[-4000:]
