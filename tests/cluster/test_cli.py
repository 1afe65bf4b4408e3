"""The command line, as a subprocess where the exit code is the contract."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import _parser, main, make_config, share_machine
from cluster.config import parse_config
from common.errors import ConfigError

ROOT = Path(__file__).parents[2]


def _baton(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "cluster.cli", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        env={**os.environ, "RAY_ADDRESS": "local", "HF_HUB_OFFLINE": "1", **env},
    )


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


def _assert_refused(done: subprocess.CompletedProcess[str], *words: str) -> None:
    assert done.returncode == 2, done
    assert done.stderr.count("\n") == 1, done.stderr
    assert done.stdout == ""
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--page-size", "12"), ("worker.page_size", "power of two")),
        (("--max-context-tokens", "4096", "--max-total-tokens", "64"), ("max_context_tokens", "raise")),
        (("--set", "decode.options.page_size=32"), ("decode.options.page_size", "under worker")),
        (("--set", "decode.options.dtype=float32"), ("decode.options.dtype", "under worker")),
        (
            ("--set", "decode.options.eviction_policy=oldest"),
            ("decode.options.eviction_policy: 'oldest' is unknown", "use one of lru, mru, lfu, fifo, filo"),
        ),
        (
            ("--kv-cache-dtype", "int3"),
            ("worker.kv_cache_dtype", "'auto', 'fp8_e4m3', 'fp8_e5m2' or 'fp4_e2m1'"),
        ),
        (
            ("--set", "prefill.options.kv_cache_dtype=fp8_e4m3"),
            ("decode.options.kv_cache_dtype: prefill has fp8_e4m3 and decode has auto", "under worker"),
        ),
        (("--eviction-policy", "oldest"), ("eviction_policy: 'oldest' is unknown", "lfu", "slru")),
        (("--dtype", "float8"), ("worker.dtype", "'auto', 'float32' or 'bfloat16'")),
        (("--kv-transfer-backend", "smoke"), ("kv_transfer_backend", "'auto', 'shm', 'tcp' or 'mooncake'")),
        (("--set", "worker.evict=lru"), ("worker.evict: unknown key", "one of:", "eviction_policy")),
    ],
)
def test_serve_refuses_bad_values_in_one_line(
    model: str, arguments: tuple[str, ...], words: tuple[str, ...]
) -> None:
    _assert_refused(_baton("serve", model, *arguments), *words)


def test_serve_refuses_an_unknown_model_directory(tmp_path: Path) -> None:
    _assert_refused(_baton("serve", str(tmp_path / "none")), "model:", "there is no directory")


def test_serve_refuses_a_port_in_use(model: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        _assert_refused(_baton("serve", model, "--port", port), f"port: {port}", "--port")


@pytest.mark.parametrize("port", ["0", "70000"])
def test_a_port_must_be_a_number_that_can_be_told(
    model: str, port: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "local")
    with pytest.raises(SystemExit):
        main(["serve", model, "--port", port])
    assert capsys.readouterr().err.startswith(f"baton: port: {port} is not a TCP port")


def test_serve_refuses_a_broken_config_key(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: m\ndecode:\n  num_gpu: 1\n")
    _assert_refused(_baton("serve", str(path)), "decode.num_gpu", "unknown key")


def test_schema_version_and_help() -> None:
    schema = _baton("config", "--schema")
    assert json.loads(schema.stdout)["title"] == "ServeConfig"
    assert _baton("--version").stdout.startswith("baton ")
    assert "MODEL|CONFIG.yaml" in _baton("serve", "--help").stdout
    assert _baton("config", "--check", "deploy/demo.yaml").stdout == "deploy/demo.yaml: ok\n"


def test_flags_win_over_the_file() -> None:
    arguments = _parser().parse_args(
        [
            *("serve", str(ROOT / "deploy" / "local.yaml"), "--num-prefill", "0", "--page-size", "32"),
            *("--set", "decode.drain_s=5", "--set", "worker.kv_events_config={enable: false}"),
        ]
    )
    config = parse_config(make_config(arguments))
    assert config.colocated
    assert config.worker.page_size == 32
    assert config.worker.max_total_tokens == 16384
    assert not config.worker.kv_events_config.enable
    assert config.decode.drain_s == 5


def test_set_refuses_to_go_below_a_value(model: str) -> None:
    arguments = _parser().parse_args(["serve", model, "--set", "model.x=1"])
    with pytest.raises(ConfigError, match="not a section"):
        make_config(arguments)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--set", "decode.replicas=2"), "decode.replicas: unknown key"),
        (("--set", "decode"), "--set: 'decode' is not KEY=VALUE"),
        (("--set", "decode=[1"), "decode: '[1' is not YAML"),
        (("--num-decode", "0"), "decode.num_replicas: Input should be greater than or equal to 1"),
    ],
)
def test_every_refusal_is_one_line_and_exit_code_2(
    model: str, arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["serve", model, *arguments])
    told = capsys.readouterr()
    assert ended.value.code == 2
    assert told.err.startswith(f"baton: {says}")
    assert told.err.count("\n") == 1
    assert told.out == ""


@pytest.mark.parametrize(
    ("raw", "threads", "gpus"),
    [
        ({"decode": {"num_replicas": 3}}, 2, 0.5),
        ({"prefill": {"num_replicas": 0}}, 8, 1.0),
        ({"worker": {"threads": 5}, "decode": {"num_gpus": 2}}, 5, 2),
    ],
)
def test_workers_share_the_machine(
    raw: dict[str, Any], threads: int, gpus: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.cli.os.cpu_count", lambda: 8)
    monkeypatch.setattr("cluster.cli._gpus", lambda: 2)
    config = share_machine(parse_config({"model": "m", **raw}))
    assert config.worker.threads == threads
    assert config.decode.num_gpus == gpus
