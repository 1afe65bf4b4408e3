"""The command line."""

from __future__ import annotations

import argparse
import json
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from cluster.cli import main, parser_for
from cluster.config import parse_config
from cluster.local import LocalOptions
from cluster.serve_command import make_config, share_machine
from common.errors import ConfigError
from tools.demo import free_port

ROOT = Path(__file__).parents[2]


def _refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line on stderr with which `baton` ends, with exit code 2 and nothing on stdout."""
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    told = capsys.readouterr()
    assert ended.value.code == 2
    assert told.out == ""
    assert told.err.count("\n") == 1, told.err
    assert told.err.startswith("baton: ")
    return told.err


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "config.json").write_text("{}")
    return str(tmp_path)


@pytest.fixture
def no_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    """No Ray runs, and the hub is not asked."""
    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


def parse(words: list[str]) -> argparse.Namespace:
    return parser_for(words).parse_args(words)


def test_help_loads_neither_ray_nor_torch() -> None:
    said = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "cluster.cli", "--help"],
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
        timeout=60,
    )
    loaded = {line.rpartition("|")[2].strip().partition(".")[0] for line in said.stderr.splitlines()}
    assert "argparse" in loaded
    assert not loaded & {"ray", "torch", "transformers"}
    assert all(
        name in said.stdout
        for name in ("serve", "tree", "top", "trace", "replay", "roles", "doctor", "config")
    )


def test_commands_that_ask_a_router_load_neither_ray_nor_torch() -> None:
    """With --url they need none, and answer within a second."""
    names = ["top", "tree_command", "cache_command", "forget_command", "trace_command", "chat_command"]
    script = f"import {', '.join(f'cluster.{name}' for name in names)}, sys; print(*sys.modules)"
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, cwd=ROOT, timeout=60
    )
    assert {"ray", "torch", "transformers"}.isdisjoint(said.stdout.split())


def test_a_refusal_ends_the_process_with_exit_code_2(model: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "cluster.cli", "serve", model, "--page-size", "12"],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
        check=False,
    )
    assert done.returncode == 2, done
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1, done.stderr
    assert "worker.page_size" in done.stderr


def test_the_parsers_of_outputs_reach_the_router(model: str) -> None:
    arguments = parse(["serve", model, "--tool-call-parser", "hermes", "--reasoning-parser", "none"])
    (one,) = parse_config(make_config(arguments)).router_options().served
    assert (one.tool_call_parser, one.reasoning_parser) == ("hermes", "none")


def test_a_chat_template_reaches_the_router_as_text(model: str, tmp_path: Path) -> None:
    file = tmp_path / "other.jinja"
    file.write_text("{{ messages[0].content }}!")
    for given in (str(file), file.read_text()):
        arguments = parse(["serve", model, "--chat-template", given])
        (one,) = parse_config(make_config(arguments)).router_options().served
        assert one.chat_template == file.read_text()


def test_names_of_metrics_for_vllms_dashboards_reach_the_router(model: str) -> None:
    config = parse_config(make_config(parse(["serve", model, "--metrics-compat", "vllm"])))
    assert config.router_options().metrics_compat == "vllm"


def test_the_generation_config_reaches_router_and_workers(model: str) -> None:
    arguments = parse(["serve", model, "--generation-config", "vllm"])
    config = parse_config(make_config(arguments))
    assert [one.generation_config for one in config.router_options().served] == ["vllm"]
    assert {config.worker_options(key).generation_config for key in ("prefill", "decode")} == {"vllm"}


def test_the_pooling_reaches_the_router(model: str) -> None:
    config = parse_config(make_config(parse(["serve", model, "--pooling", "mean"])))
    assert config.router_options().pooling == "mean"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--page-size", "12"), ("worker.page_size", "power of two")),
        (("--set", "worker.foo=1"), ("baton: worker.foo: unknown key", "page_size")),
        (("--set", "router.options.policy=kv2"), ("router.options.policy: 'kv2' is unknown", "round-robin")),
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
        (("--weight-dtype", "int3"), ("worker.weight_dtype", "'auto', 'bfloat16' or 'int8'")),
        (("--set", "prefill.options.weight_dtype=int8"), ("decode.options.weight_dtype", "under worker")),
        (("--eviction-policy", "oldest"), ("eviction_policy: 'oldest' is unknown", "lfu", "slru")),
        (("--dtype", "float8"), ("worker.dtype", "'auto', 'float32', 'bfloat16' or 'float16'")),
        (
            ("--kv-transfer-backend", "smoke"),
            ("kv_transfer_backend", "'auto', 'cuda_ipc', 'shm', 'tcp' or 'mooncake'"),
        ),
        (("--set", "worker.evict=lru"), ("worker.evict: unknown key", "one of:", "eviction_policy")),
    ],
)
def test_serve_refuses_bad_values_in_one_line(
    model: str, arguments: tuple[str, ...], words: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    line = _refused(capsys, "serve", model, *arguments)
    assert all(word in line for word in words), line


@pytest.mark.usefixtures("no_ray")
def test_serve_refuses_an_unknown_model_directory(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = _refused(capsys, "serve", str(tmp_path / "none"))
    assert line.startswith("baton: model: there is no directory")


@pytest.mark.usefixtures("no_ray")
def test_serve_refuses_a_port_in_use(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        line = _refused(capsys, "serve", model, "--port", port)
    assert line.startswith(f"baton: port: {port}")
    assert "--port" in line


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize("port", ["0", "70000"])
def test_a_port_must_be_a_number_that_can_be_told(
    model: str, port: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = _refused(capsys, "serve", model, "--port", port)
    assert line.startswith(f"baton: port: {port} is not a TCP port")


def test_an_option_has_its_whole_name(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (("serve", model, "--num-prefil", "0"), ("tree", "--js"), ("--versio",)):
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 2
        assert "--" in capsys.readouterr().err


@pytest.mark.usefixtures("no_ray")
@pytest.mark.parametrize(
    ("written", "words"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "no causal LM head"),
        ({"model_type": "mamba", "architectures": ["MambaForCausalLM"]}, "'mamba' in config.json: it is not"),
        ({"model_type": "no_such_type"}, "no_such_type"),
    ],
)
def test_a_model_that_is_not_computed_is_refused_before_ray_starts(
    tmp_path: Path, written: dict[str, Any], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(written))
    line = _refused(capsys, "serve", str(tmp_path), "--port", str(free_port()))
    assert line.startswith("baton: model: ")
    assert words in line


@pytest.mark.usefixtures("no_ray")
def test_a_generation_config_that_is_not_there_is_refused_before_ray_starts(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = _refused(capsys, "serve", model, "--port", str(free_port()), "--generation-config", "/nowhere")
    assert line.startswith("baton: generation_config: /nowhere has no generation_config.json")


def test_serve_refuses_a_broken_config_key(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.yaml"
    path.write_text("model: m\ndecode:\n  num_gpu: 1\n")
    line = _refused(capsys, "serve", str(path))
    assert line.startswith("baton: decode.num_gpu: unknown key; remove it, or use one of: accelerator_type, ")


def test_schema_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["config", "--schema"]) == 0
    assert json.loads(capsys.readouterr().out)["title"] == "ServeConfig"
    demo = str(ROOT / "deploy" / "demo.yaml")
    assert main(["config", "--check", demo]) == 0
    assert capsys.readouterr().out == f"{demo}: ok\n"
    for arguments, says in [(["--version"], "baton "), (["serve", "--help"], "usage: baton serve")]:
        with pytest.raises(SystemExit) as ended:
            main(arguments)
        assert ended.value.code == 0
        assert capsys.readouterr().out.startswith(says)


def test_flags_win_over_the_file() -> None:
    arguments = parse(
        [
            *("serve", str(ROOT / "deploy" / "local.yaml"), "--num-prefill", "0", "--page-size", "32"),
            *("--set", "decode.drain_s=5", "--set", "worker.kv_events_config={enable: false}"),
        ]
    )
    config = parse_config(make_config(arguments))
    assert list(config.worker_sections()) == ["decode"]
    assert config.worker.page_size == 32
    assert config.worker.max_total_tokens == 16384
    assert not config.worker.kv_events_config.enable
    assert config.decode.drain_s == 5


def test_set_refuses_to_go_below_a_value(model: str) -> None:
    arguments = parse(["serve", model, "--set", "model.x=1"])
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
    assert _refused(capsys, "serve", model, *arguments).startswith(f"baton: {says}")


@pytest.mark.parametrize(
    ("raw", "threads", "gpus"),
    [
        ({"decode": {"num_replicas": 3}}, 2, 0.5),
        ({"decode": {"num_replicas": 2}}, 2, 0.5),
        ({"prefill": {"num_replicas": 0}}, 8, 1.0),
        ({"worker": {"threads": None}, "decode": {"options": {"threads": None}}}, 4, 1.0),
        ({"worker": {"threads": 5}, "decode": {"num_gpus": 2}}, 5, 2),
        ({"roles": "dynamic", "dynamic": {"num_replicas": 4}}, 2, 0.5),
        ({"prefill": {"num_replicas": 0}, "worker": {"tp_size": 2}}, 8, 2.0),
        ({"decode": {"options": {"tp_size": 2}}}, 4, 2.0),
        ({"worker": {"tp_size": 2, "device": "cpu"}}, 4, 1.0),
    ],
)
def test_workers_share_the_machine(
    raw: dict[str, Any], threads: int, gpus: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("cluster.serve_command.os.cpu_count", lambda: 8)
    monkeypatch.setattr("cluster.serve_command.gpus_found", lambda: ["gpu0", "gpu1"])
    config = share_machine(parse_config({"model": "m", **raw}))
    assert config.worker.threads == threads
    assert config.worker_options(list(config.worker_sections())[-1]).threads == threads
    assert list(config.worker_sections().values())[-1].num_gpus == gpus


def test_a_number_of_workers_makes_the_roles_dynamic(model: str) -> None:
    arguments = parse(["serve", model, "--num-workers", "4"])
    assert make_config(arguments) == {"model": model, "roles": "dynamic", "dynamic": {"num_replicas": 4}}


def test_a_number_of_workers_and_one_of_a_role_are_refused(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = _refused(capsys, "serve", model, "--num-workers", "4", "--num-decode", "2")
    assert line.startswith("baton: decode: it has no effect with roles: dynamic")


def test_roles_without_a_ray_are_refused(no_ray: None, capsys: pytest.CaptureFixture[str]) -> None:
    assert _refused(capsys, "roles").startswith("baton: RAY_ADDRESS: no Ray runs on this machine")
    assert _refused(capsys, "roles", "w0=both").startswith("baton: WORKER=ROLE: 'w0=both' is none")


@pytest.mark.parametrize("command", [["serve", "MODEL"], ["doctor", "--cluster"], ["roles"], ["top"]])
@pytest.mark.parametrize("address", ["127.0.0.1:PORT", "nonsense", "127.0.0.1:70000"])
def test_an_address_without_a_ray_is_refused_at_once(
    model: str,
    command: list[str],
    address: str,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    address = address.replace("PORT", str(free_port()))
    monkeypatch.setenv("RAY_ADDRESS", address)
    monkeypatch.setattr("cluster.serve_command.leave_session", lambda: None)
    words = [model if word == "MODEL" else word for word in command]
    started = time.monotonic()
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert time.monotonic() - started < 10, "Ray itself tries for minutes"
    line = capfd.readouterr().err
    assert line.startswith(f"baton: RAY_ADDRESS: {address} is no Ray that can be used: ")
    assert line.count("\n") == 1


def test_an_empty_ray_address_is_none(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "")
    with pytest.raises(SystemExit) as ended, socket.create_server(("127.0.0.1", 0)) as taken:
        main(["serve", model, "--port", str(taken.getsockname()[1])])
    assert ended.value.code == 2, "what a Ray of its own needs is checked"


@pytest.mark.parametrize(
    ("host", "url"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::1", "http://[::1]:8000"),
        ("::", "http://[::1]:8000"),
        ("localhost", "http://localhost:8000"),
    ],
)
def test_the_url_that_is_printed_is_one(host: str, url: str) -> None:
    assert LocalOptions(host=host).url == url
