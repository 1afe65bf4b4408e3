"""`make demo`: one streamed chat through router, prefill worker, KV transfer and decode worker on Ray Serve.

Starts a Ray of its own in a temporary directory and the application of deploy/demo.yaml on free ports, and
ends with one line whose figures come from the request's own timeline:

    demo ok: prefill=<id> decode=<id> kv=1.2 MiB over shm, ttft 41 ms, clean

`clean` is printed only when no process, port, shared memory or Ray session is left on the machine. With
KEEP=1 everything runs on until Ctrl-C.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import shutil
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from cluster.app import build
from cluster.config import parse_config
from cluster.config_file import read_config
from cluster.directory_actor import DirectoryFinder
from cluster.local import DeployFailed, LocalOptions, LocalServe
from cluster.running import APP_NAME
from common.options import exit_on_config_error
from common.stop_signal import StopSignal
from tests.harness.leftovers import Run

ROOT = Path(__file__).resolve().parents[1]
QUESTION = "How do I use os.path.join?"
_START_S = 120.0
_ANSWER_S = 60.0
_SETTLE_S = 10.0
_POLL_S = 0.05
_MIB = 1024 * 1024


class DemoFailed(Exception):
    """A check of the demo failed."""


@dataclass(frozen=True)
class Served:
    """Which workers served the request, and how, by its timeline."""

    prefill: str
    decode: str
    kv_bytes: int
    kv_backend: str
    ttft_ms: float

    def __str__(self) -> str:
        mib = self.kv_bytes / _MIB
        return (
            f"prefill={self.prefill} decode={self.decode} "
            f"kv={mib:.{1 if mib >= 0.1 else 3}f} MiB over {self.kv_backend}, ttft {self.ttft_ms:.0f} ms"
        )


def main() -> int:
    """Returns the exit code: 0 when every check passes, 1 when one fails, 2 for a configuration error."""
    keep = os.environ.get("KEEP", "") not in ("", "0")
    # Without a token in the environment, Ray would store one in the home directory.
    os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    run = Run.begin()
    try:
        with exit_on_config_error("demo"), _temporary_directory() as temporary:
            served = _demo(run, temporary, keep)
        left = run.leftovers(_SETTLE_S)
        left += [f"Ray session {temporary}"] if temporary.exists() else []
        if left:
            raise DemoFailed("left behind: " + "; ".join(left))
    except (DemoFailed, DeployFailed) as failure:
        print(f"demo failed: {failure}", file=sys.stderr)
        return 1
    print(f"demo ok: {served}, clean")
    return 0


def _demo(run: Run, temporary: Path, keep: bool) -> Served:
    raw = read_config(ROOT / "deploy" / "demo.yaml")
    config = parse_config(raw)
    options = LocalOptions(
        port=free_port(), cpus=config.cpus(), shutdown_s=config.shutdown_s(), temp_dir=temporary
    )
    print(
        f"starting Ray and {config.model_name}: 1 router, 1 prefill worker, 1 decode worker ...", flush=True
    )
    started = time.monotonic()
    with LocalServe(options) as local:
        local.deploy(build(raw), _START_S)
        print(f"ready after {time.monotonic() - started:.1f} s at {options.url}\n\n> {QUESTION}", flush=True)
        request_id = f"demo-{secrets.token_hex(4)}"
        _chat(options, config.model_name, request_id)
        served = _served(request_id)
        _check_workers(served)
        run.look()
        if keep:
            print(f"demo ok: {served}, kept up at {options.url}/v1 (KEEP=1): Ctrl-C ends it", flush=True)
            StopSignal().wait()
    return served


def _chat(options: LocalOptions, model: str, request_id: str) -> None:
    """One streamed chat, printed as it arrives."""
    body = {
        "model": model,
        "messages": [{"role": "user", "content": QUESTION}],
        "stream": True,
        "temperature": 0,
        "max_tokens": 64,
    }
    headers = {"Content-Type": "application/json", "X-Request-Id": request_id}
    connection = http.client.HTTPConnection(options.host, options.port, timeout=_ANSWER_S)
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise DemoFailed(f"HTTP {response.status}: {response.read().decode(errors='replace')}")
        pieces = 0
        for text in _deltas(response):
            print(text, end="", flush=True)
            pieces += bool(text)
        print("\n", flush=True)
    finally:
        connection.close()
    if pieces < 2:
        raise DemoFailed(f"the answer came in {pieces} piece(s): it was not streamed")


def _deltas(response: http.client.HTTPResponse) -> Iterator[str]:
    """Text of each server-sent chunk. Raises DemoFailed when the stream does not end with [DONE]."""
    for line in response:
        name, _, data = line.decode().strip().partition(": ")
        if data == "[DONE]":
            return
        if name == "data":
            choices = json.loads(data).get("choices", [])
            yield "".join(choice["delta"].get("content") or "" for choice in choices)
    raise DemoFailed("the stream ended without [DONE]")


def _served(request_id: str) -> Served:
    """The request's timeline, which is complete when the decode worker has reported the bytes of KV."""

    def summary() -> dict[str, Any] | None:
        found: dict[str, Any] = _get(f"/debug/trace/{request_id}")["otherData"]
        return found if found["kv_bytes"] else None

    found = _eventually(summary, "the timeline does not show a KV transfer")
    return Served(found["prefill"], found["decode"], found["kv_bytes"], found["kv_backend"], found["ttft_ms"])


def _check_workers(served: Served) -> None:
    """Raises DemoFailed unless two different live processes served the request."""
    pids = {worker["id"]: worker["pid"] for worker in _get("/debug/workers")["workers"]}
    used = {pids.get(served.prefill), pids.get(served.decode)}
    if None in used or len(used) != 2:
        raise DemoFailed(f"{served.prefill} and {served.decode} are not two live processes: {pids}")
    for pid in used:
        if not Path(f"/proc/{pid}").exists():
            raise DemoFailed(f"worker process {pid} is gone")


def _get(path: str) -> dict[str, Any]:
    """A page of the router's admin listener."""
    admin = urlsplit(DirectoryFinder(APP_NAME).admins()[0])
    connection = http.client.HTTPConnection(admin.netloc, timeout=_ANSWER_S)
    try:
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
    finally:
        connection.close()
    if response.status != http.client.OK:
        raise DemoFailed(f"GET {path}: HTTP {response.status}: {body.decode(errors='replace')}")
    return dict(json.loads(body))


Found = TypeVar("Found")


def _eventually(ask: Callable[[], Found | None], failure: str) -> Found:
    deadline = time.monotonic() + _SETTLE_S
    while (found := ask()) is None:
        if time.monotonic() >= deadline:
            raise DemoFailed(failure)
        time.sleep(_POLL_S)
    return found


@contextmanager
def _temporary_directory() -> Iterator[Path]:
    """A new directory with a short path, because Ray puts Unix sockets (at most 107 characters) below it."""
    directory = Path(tempfile.mkdtemp(prefix="baton-", dir="/tmp"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def free_port() -> int:
    """A port that is free now. Serve needs a number; it does not report a port that it chooses itself."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    sys.exit(main())
