"""`baton serve` on a Ray of its own: one chat, again from the cache, SIGTERM, and nothing is left."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.ray_cluster import ROOT, free_ports, ray_environment, short_temporary_directory
from tests.e2e.served import Served, served
from tests.harness.leftovers import Run

DEMO_MODEL = ROOT / "deploy" / "demo_model"
QUESTION = "How do I use os.path.join to build the path of a file from its parts?"
_READY_S = 200.0
_END_S = 60.0


def _chat(client: Served) -> tuple[str, int]:
    """The answer's text and how many prompt tokens came from a cache."""
    answer = client.openai.chat.completions.create(
        model="demo_model", messages=[{"role": "user", "content": QUESTION}], max_tokens=24, temperature=0
    )
    assert answer.choices[0].finish_reason in {"stop", "length"}
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return answer.choices[0].message.content or "", (details and details.cached_tokens) or 0


def _serve(target: str, port: int, temporary: Path, *flags: str, **streams: Any) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "cluster.cli", "serve", target, "--port", str(port), *flags],
        cwd=ROOT,
        env=ray_environment(temporary),
        start_new_session=True,
        **streams,
    )


@pytest.mark.ray_smoke
def test_baton_serve_answers_and_leaves_nothing(tmp_path: Path) -> None:
    run = Run.begin()
    port, admin_port = free_ports(2)
    with short_temporary_directory() as temporary, (tmp_path / "baton.log").open("wb") as log:
        ports, cache = f"router.options.admin_ports={admin_port}", tmp_path / "cache"
        flags = ("--set", ports, "--set", f"model_cache={cache}")
        process = _serve("deploy/demo.yaml", port, temporary, *flags, stdout=log, stderr=subprocess.STDOUT)
        try:
            with served(f"http://127.0.0.1:{port}", admin_port) as client:
                client.wait_for_workers(2, _READY_S)
                text, _ = _chat(client)
                again, cached = _chat(client)
                for path in ("/metrics", "/admin/routers", "/debug/workers", "/debug/inspect"):
                    assert client.http.get(path).status_code == 404, "for operators: not at Serve's port"
                assert client.admin.get("/metrics").status_code == 200
                client.settle()
            run.look()
        finally:
            os.killpg(process.pid, signal.SIGTERM)  # as `timeout` and process managers do
            code = process.wait(_END_S)
        said = Path(log.name).read_text()
    assert text
    assert again == text
    assert cached > 0
    (copied,) = (path for path in cache.iterdir() if not path.name.startswith("."))
    assert (copied / "config.json").is_file(), "both workers read one copy"
    assert (code, said.splitlines()[-1]) == (0, "stopped"), said
    for role in ("prefill", "decode"):
        assert re.search(rf"s  {role}-\w+: loading demo_model\n", said), said
        assert re.search(
            rf"s  {role}-\w+: cpu \(\w+ kernels\); .*; threads: \d+; KV for [\d,]+ tokens in .* bytes",
            said,
        )
    assert run.leftovers(10.0) == []


@pytest.mark.e2e
def test_a_model_that_a_replica_refuses_ends_in_one_line(tmp_path: Path) -> None:
    """Only the worker knows what it can compute; its refusal must come back through Serve."""
    model = tmp_path / "model"
    shutil.copytree(DEMO_MODEL, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "architectures": ["Qwen3Model"]}))
    run = Run.begin()
    with short_temporary_directory() as temporary:
        process = _serve(
            str(model), free_ports(1)[0], temporary, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
        )
        _, told = process.communicate(timeout=_READY_S)
    assert process.returncode == 2
    assert told.decode().startswith("baton: model: ")
    assert told.count(b"\n") == 1
    assert run.leftovers(10.0) == []
