"""Our Triton kernels without a GPU: interpreted, or compiled for one."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

CAPABILITIES = (80, 90, 100)
"""Of A100, H100 and B200."""
MOST_SHARED_BYTES = 99 * 1024  # of a program: what any GPU from 8.0 on has

_COMPILE = """
import importlib, json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

module, name, sizes, types, constants, absent, aligned, capability = json.loads(sys.argv[1])
module = importlib.import_module(f"engine.cuda.{module}")
kernel, options = getattr(module, name), module.tile_options(*sizes)
launch = {each: options.pop(each) for each in ("num_warps", "num_stages") if each in options}
early = capability >= 90 and "EARLY" in kernel.arg_names
constants |= options | dict.fromkeys(absent)
if "EARLY" in kernel.arg_names:
    constants["EARLY"] = early
signature = {each: "constexpr" if each in constants else types.get(each, "i32") for each in kernel.arg_names}
attributes = {(kernel.arg_names.index(each),): [["tt.divisibility", 16]] for each in aligned}
made = triton.compile(
    ASTSource(kernel, signature=signature, constexprs=constants, attrs=attributes),
    target=GPUTarget("cuda", capability, 32),
    options=launch | ({"launch_pdl": True} if early else {}),
)
print(json.dumps({"shared": made.metadata.shared, "ptx": made.asm["ptx"], "bytes": len(made.asm["cubin"])}))
"""


_UNSPECIALIZED = """
import importlib, sys

kernel = getattr(importlib.import_module(f"engine.cuda.{sys.argv[1]}"), sys.argv[2])
print(*(each.name for each in kernel.params if each.do_not_specialize))
"""


def unspecialized(module: str, name: str) -> set[str]:
    """A kernel's arguments for whose values it is not compiled anew."""
    pytest.importorskip("triton", reason="Triton is not installed: make kernels installs it")
    return set(_run(_UNSPECIALIZED, module, name).stdout.split())


def _run(program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A program of ours in a Python that compiles kernels."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment |= {"TRITON_ALWAYS_COMPILE": "1", "TRITON_DUMP_PTXAS_LOG": "1"}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done


def interpreted() -> None:
    """Skip the test unless Triton interprets kernels. It must know that when it is imported."""
    pytest.importorskip("triton", reason="Triton is not installed: make kernels installs it")
    if os.environ.get("TRITON_INTERPRET") != "1":
        pytest.skip("TRITON_INTERPRET is not 1: make kernels sets it")


def compiled(
    module: str,
    name: str,
    sizes: Sequence[object],
    types: Mapping[str, str],
    constants: Mapping[str, object],
    absent: Sequence[str],
    aligned: Sequence[str],
    capability: int,
) -> dict[str, Any]:
    """A kernel's machine code for a compute capability: its PTX, the bytes of shared memory it needs, and
    those of registers that it spills.

    `sizes` are the arguments of the module's tile_options. `types` are those of pointers and floats; other
    arguments are int32. `absent` arguments are None, `aligned` ones multiples of 16.
    """
    pytest.importorskip("triton", reason="Triton is not installed: make kernels installs it")
    case = json.dumps([module, name, sizes, types, constants, absent, aligned, capability])
    done = _run(_COMPILE, case)
    made: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    assert made["bytes"] > 0
    made["spilled"] = sum(map(int, re.findall(r"(\d+) bytes spill stores", done.stdout)))
    assert "bytes spill stores" in done.stdout, "ptxas' report has another form"
    return made
