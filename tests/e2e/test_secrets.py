"""Real programs refuse to be open: off loopback, nothing starts without a proper secret."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from common.secrets import SECRET_VARIABLE
from tests.harness.processes import Child
from tests.support.members import write_secret

_PROGRAMS = {
    "router": {"served_model_name": "m"},
    "router.directory": None,
    "prefill_node": {"max_total_tokens": 1024},
    "decode_node": {"max_total_tokens": 1024},
}


def refusal(module: str, scratch: Path, variable: str | None = None, **options: Any) -> str:
    """The one line of a program that exits with 2."""
    more = _PROGRAMS[module]
    if more is not None:
        options |= {"model": "deploy/demo_model", **more}
    environment = {key: value for key, value in os.environ.items() if key != SECRET_VARIABLE}
    if variable is not None:
        environment[SECRET_VARIABLE] = variable
    with Child(module, options, scratch, environment={**environment, "PYTHONWARNINGS": "ignore"}) as child:
        return child.refusal()


@pytest.mark.parametrize("module", _PROGRAMS)
def test_off_loopback_nothing_starts_without_a_secret(module: str, tmp_path: Path) -> None:
    assert "cluster_secret_file" in refusal(module, tmp_path, interface="0.0.0.0")


@pytest.mark.parametrize("module", _PROGRAMS)
def test_a_placeholder_ends_with_code_2(module: str, tmp_path: Path) -> None:
    file = write_secret(tmp_path, "CHANGE_ME")
    assert "placeholder" in refusal(module, tmp_path, cluster_secret_file=str(file))


def test_a_placeholder_in_the_environment_too(tmp_path: Path) -> None:
    assert "placeholder" in refusal("router.directory", tmp_path, variable="CHANGE_ME_" * 4)


def test_baton_serve_does_not_either(tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text("model: deploy/demo_model\ninterface: auto\n")
    done = subprocess.run(
        [sys.executable, "-m", "cluster.cli", "config", "--check", str(file)],
        capture_output=True, text=True, timeout=120.0,
        env={key: value for key, value in os.environ.items() if key != SECRET_VARIABLE},
    )  # fmt: skip
    assert done.returncode == 2
    assert "cluster_secret_file" in done.stderr
