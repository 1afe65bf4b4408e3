"""Whether torch can compute on this node's GPU. It is asked in a process of its own, which can be given up: a
driver that hangs, hangs whoever asks.

python -m cluster.doctor.gpu_probe    prints problem and remedy as JSON, null when there is none
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import common
from cluster.doctor.facts import Problem
from common.errors import ConfigError

_BOUND_S = 45.0  # the import of torch and the start of CUDA on a node with other work
_REMEDY = "see that nvidia-smi answers, repair the driver, or set device to cpu"


def gpu_problem() -> Problem | None:
    """What keeps torch from using the GPU that is there."""
    asked = [sys.executable, "-m", "cluster.doctor.gpu_probe"]
    root = Path(common.__file__).parent.parent
    try:
        done = subprocess.run(  # noqa: S603  our own module
            asked, cwd=root, capture_output=True, text=True, timeout=_BOUND_S, check=False
        )
    except subprocess.TimeoutExpired:
        return Problem(f"torch has not used the GPU within {_BOUND_S:g} s", _REMEDY)
    if done.returncode:
        said = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        return Problem(f"torch cannot be asked for the GPU: {said}", _REMEDY)
    found = json.loads(done.stdout.splitlines()[-1])
    return None if found is None else Problem(*found)


def main() -> None:
    from worker.device import choose_device  # torch takes seconds to import

    try:
        choose_device("auto")
    except ConfigError as error:
        found: tuple[str, str] | None = (error.problem, error.remedy)
    else:
        found = None
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
