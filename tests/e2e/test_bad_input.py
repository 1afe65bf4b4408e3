"""Options that cannot work: one line on stderr that names key and remedy, exit code 2, nothing left."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest
from transformers import MistralConfig

from tests.harness.processes import Child
from tests.support.tiny_models import write_tiny


def run(module: str, scratch: Path, **options: Any) -> str:
    """The one line that `python -m MODULE` leaves on stderr."""
    with Child(module, options, scratch, environment={**os.environ, "PYTHONWARNINGS": "ignore"}) as child:
        (line,) = child.refusal().splitlines()
    assert line.startswith(f"{module.rpartition('.')[2]}: "), line
    return line


@pytest.mark.parametrize(("options", "key", "remedy"), [
    ({"page_size": 24}, "page_size", "power of two"),
    ({"max_total_tokens": 256, "max_context_tokens": 512}, "max_context_tokens", "raise max_total_tokens"),
])  # fmt: skip
def test_an_option_that_cannot_work(tmp_path: Path, options: dict[str, Any], key: str, remedy: str) -> None:
    line = run(
        "decode_node", tmp_path, **{"model": "any", "engine": "fake", "max_total_tokens": 1024, **options}
    )
    assert key in line
    assert remedy in line


def test_a_model_directory_that_is_not_there(tmp_path: Path) -> None:
    line = run("decode_node", tmp_path, model=str(tmp_path / "nowhere"))
    assert "model" in line
    assert "nowhere" in line


def test_an_architecture_without_a_causal_head(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "t5", "architectures": ["T5Model"]}))
    line = run("prefill_node", tmp_path, model=str(tmp_path))
    assert "T5Model" in line
    assert "no causal LM head" in line


def test_a_model_that_the_gate_refuses(tmp_path: Path) -> None:
    config = MistralConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, max_position_embeddings=512, sliding_window=1,
    )  # fmt: skip
    write_tiny(config, tmp_path / "narrow", seed=1)
    line = run("decode_node", tmp_path, model=str(tmp_path / "narrow"), max_total_tokens=1024)
    assert "sliding_window is 1" in line


def test_a_port_in_use(tmp_path: Path, tiny_model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = run("router", tmp_path, model=str(tiny_model), served_model_name="m", port=port)
    assert "port" in line
    assert str(port) in line


@pytest.mark.parametrize(("module", "use"), [
    ("router", "mailboxes"), ("router.directory", "mailboxes"), ("prefill_node", "mailboxes"),
    ("prefill_node", "events"), ("decode_node", "kv"),
])  # fmt: skip
def test_a_range_of_ports_that_is_used_up(tmp_path: Path, tiny_model: Path, module: str, use: str) -> None:
    options: dict[str, Any] = {"model": str(tiny_model), "served_model_name": "m"}
    if module == "router":
        options |= {"port": 0, "admin_ports": "0"}
    elif module == "router.directory":
        options = {}
    else:
        options |= {"engine": "fake", "max_total_tokens": 1024, "kv_transfer_backend": "tcp"}
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        line = run(module, tmp_path, **options, ports={use: port})
    assert f"ports.{use}: no port of {port} is free on 127.0.0.1" in line


@pytest.mark.parametrize(("here", "there", "key"), [
    ({"engine": "fake", "page_size": 16}, {"engine": "fake", "page_size": 32}, "page_size"),
    ({"dtype": "float32"}, {"dtype": "bfloat16"}, "dtype"),
])  # fmt: skip
def test_prefill_and_decode_that_do_not_fit_together(
    tmp_path: Path, tiny_model: Path, here: dict[str, Any], there: dict[str, Any], key: str
) -> None:
    common = {"model": str(tiny_model), "served_model_name": "m", "max_total_tokens": 1024}
    with Child(
        "router",
        {"model": str(tiny_model), "served_model_name": "m", "port": 0, "admin_ports": "0"},
        tmp_path,
    ) as router:
        common["directory"] = router.wait_ready()["mailbox"]
        with Child("decode_node", {**common, **here}, tmp_path) as decode:
            decode.wait_ready()
            line = run("prefill_node", tmp_path, **common, **there)
            assert f"{key}:" in line
            assert decode.process.poll() is None, "the worker that was there first stays"
