"""`baton doctor` on this node: faults seeded in files, ports and options are found where they are."""

from __future__ import annotations

import json
import shutil
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from cluster.cli import main
from cluster.doctor import gather as gathering
from cluster.doctor.gather import gather
from cluster.doctor.memory import worker_bytes
from cluster.doctor.preflight import Listeners, connect
from common.errors import ConfigError
from tests.support.image_models import written
from tests.support.members import OTHER_SECRET, SECRET, write_secret
from tests.support.quantised_checkpoints import FORMATS, OF_ONE_FAMILY, published_v4, write
from tests.support.tiny_models import make_tiny
from wire.options import PortOptions
from worker.options import WorkerOptions

DEMO = Path(__file__).parents[2] / "deploy" / "demo_model"
GIB = 1 << 30


@pytest.fixture(autouse=True)
def sound_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the machine of a test may lack is there."""
    monkeypatch.setattr(gathering, "_size_of", lambda path: GIB)
    monkeypatch.setattr(gathering, "gpus_found", list)
    monkeypatch.setattr(gathering, "rdma_devices", lambda: ())
    monkeypatch.delenv("BATON_CLUSTER_SECRET", raising=False)


@pytest.fixture
def serving(tmp_path: Path) -> dict[str, Any]:
    """A configuration of the demo model, whose directory may be spoilt."""
    shutil.copytree(DEMO, tmp_path / "model")
    return {"model": str(tmp_path / "model"), "worker": {"max_total_tokens": 4096}}


def doctor(
    capsys: pytest.CaptureFixture[str], directory: Path, config: dict[str, Any]
) -> tuple[int, list[dict[str, str]]]:
    """The exit code, and the findings that are faults."""
    path = directory / "config.yaml"
    path.write_text(json.dumps(config))
    code = main(["doctor", str(path), "--json"])
    found = json.loads(capsys.readouterr().out)
    return code, [one for one in found if one["grade"] == "FAULT"]


def test_a_sound_node(capsys: pytest.CaptureFixture[str], tmp_path: Path, serving: dict[str, Any]) -> None:
    assert doctor(capsys, tmp_path, serving) == (0, [])


def test_the_machine_alone_as_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for word in ("check", "remedy", "versions", "Ray ", "shared memory", " 0 faults"):
        assert word in said


@pytest.mark.parametrize("use", ["mailboxes", "kv"])
def test_a_port_that_is_taken(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, serving: dict[str, Any], use: str
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        code, (fault,) = doctor(capsys, tmp_path, {**serving, "ports": {use: port}})
    assert (code, fault["check"]) == (1, "ports")
    assert fault["found"] == f"ports.{use} {port}: 0 of 1 free"
    assert f"give ports.{use} another, larger range" in fault["remedy"]


def test_a_missing_file_of_the_model(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, serving: dict[str, Any]
) -> None:
    (tmp_path / "model" / "model.safetensors").unlink()
    code, (fault,) = doctor(capsys, tmp_path, serving)
    assert (code, fault["check"]) == (1, "model")
    assert "lacks model.safetensors" in fault["found"]
    assert fault["remedy"] == "copy the whole checkpoint to this node"


def test_a_missing_shard(capsys: pytest.CaptureFixture[str], tmp_path: Path, serving: dict[str, Any]) -> None:
    model = tmp_path / "model"
    (model / "model.safetensors").rename(model / "model-1-of-2.safetensors")
    shards = {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    _, (fault,) = doctor(capsys, tmp_path, serving)
    assert "lacks model-2-of-2.safetensors" in fault["found"]


def test_weights_that_were_not_copied_to_the_end(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, serving: dict[str, Any]
) -> None:
    weights = tmp_path / "model" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    _, (fault,) = doctor(capsys, tmp_path, serving)
    assert "shorter than its header says" in fault["found"]
    assert fault["remedy"] == "copy it again"


def test_a_secret_that_every_user_may_read(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, serving: dict[str, Any]
) -> None:
    file = write_secret(tmp_path)
    file.chmod(0o644)
    code, (fault,) = doctor(capsys, tmp_path, {**serving, "cluster_secret_file": str(file)})
    assert (code, fault["check"], fault["remedy"]) == (1, "secret", f"chmod 600 {file}")


def test_a_placeholder_as_secret(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, serving: dict[str, Any]
) -> None:
    file = write_secret(tmp_path, "change-me-change-me-change-me")
    _, (fault,) = doctor(capsys, tmp_path, {**serving, "cluster_secret_file": str(file)})
    assert fault["found"] == "the secret is a placeholder"
    assert "openssl rand" in fault["remedy"]


def test_an_address_of_another_host(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, serving: dict[str, Any]
) -> None:
    secret = {"cluster_secret_file": str(write_secret(tmp_path))}
    code, (fault,) = doctor(capsys, tmp_path, {**serving, **secret, "interface": "192.0.2.77"})
    assert (code, fault["check"]) == (1, "address")
    assert "192.0.2.77 cannot be bound" in fault["found"]
    assert fault["remedy"] == "give an address of this host"


def test_gpus_that_are_not_there(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, serving: dict[str, Any]
) -> None:
    code, (fault,) = doctor(capsys, tmp_path, {**serving, "decode": {"num_gpus": 1}})
    assert (code, fault["check"]) == (1, "resources")
    assert fault["found"] == "decode asks for GPU 1, and no node has more than 0"


def test_a_pool_that_does_not_fit(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, serving: dict[str, Any]
) -> None:
    decode = {"options": {"max_total_tokens": 10**10}}
    code, (fault,) = doctor(capsys, tmp_path, {**serving, "decode": decode})
    assert (code, fault["check"]) == (1, "memory")
    assert fault["found"].startswith("decode: weights and KV take ")
    assert "lower max_total_tokens" in fault["remedy"]


def test_shared_memory_as_docker_gives_it(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    serving: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(gathering, "_size_of", lambda path: 64 << 20)
    code, (fault,) = doctor(capsys, tmp_path, serving)
    assert (code, fault["check"]) == (1, "shared memory")
    assert fault["found"] == "64 MiB in /dev/shm, 100 MiB for Ray's object store"


def test_what_cannot_work_anywhere_is_exit_code_2(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, serving: dict[str, Any]
) -> None:
    with pytest.raises(SystemExit) as ended:
        doctor(capsys, tmp_path, {**serving, "ports": {"kv": "9-8"}})
    assert ended.value.code == 2
    assert "ports.kv: 9-8 is not a range of TCP ports" in capsys.readouterr().err


def test_digests_of_secrets_are_keyed_and_show_nothing(tmp_path: Path) -> None:
    raw = {
        "model": "m",
        "worker": {"engine": "fake"},
        "cluster_secret_file": str(write_secret(tmp_path, SECRET, OTHER_SECRET)),
    }
    first, again, later = (gather("here", raw, challenge).secret_digests for challenge in (b"1", b"1", b"2"))
    assert len(first) == 2
    assert first == again
    assert not set(first) & set(later), "another run has other digests"
    assert SECRET not in str(first)


TEXT = json.loads((DEMO / "config.json").read_text())
HEAD_DIM = TEXT.get("head_dim") or TEXT["hidden_size"] // TEXT["num_attention_heads"]
TOKEN = 2 * TEXT["num_hidden_layers"] * TEXT["num_key_value_heads"] * HEAD_DIM * 4  # bytes in float32


def demo_weights() -> int:
    """Bytes of the demo model's weights in float32."""
    header = (DEMO / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", header[:8])
    tensors = json.loads(header[8 : 8 + length])
    values = sum(
        (one["data_offsets"][1] - one["data_offsets"][0]) // {"BF16": 2, "F16": 2, "F32": 4}[one["dtype"]]
        for name, one in tensors.items()
        if name != "__metadata__"
    )
    return 4 * values


def test_the_memory_of_a_worker_is_that_of_its_files_and_pool() -> None:
    raw = {"model": str(DEMO), "worker": {"max_total_tokens": 4096, "page_size": 16, "dtype": "float32"}}
    needs = gather("here", raw, b"").needs
    assert needs == dict.fromkeys(("prefill", "decode"), demo_weights() + 4096 * TOKEN)


def test_a_pool_without_a_size_is_the_share_that_the_worker_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    free, weights = 64 << 20, demo_weights()
    monkeypatch.setattr(gathering, "available_memory", lambda: free)
    monkeypatch.setattr(gathering, "_gpu_memory", lambda: (GIB,))
    raw = {
        "model": str(DEMO),
        "worker": {"dtype": "float32", "kv_memory_fraction": 0.5},
        "prefill": {"num_gpus": 1},
    }
    facts = gather("here", raw, b"")
    assert facts.memory == free
    assert facts.needs["decode"] == weights + (free - weights) // 2
    assert facts.needs["prefill"] == weights, "of a GPU the pool takes what is left"


def test_a_pool_is_no_larger_than_all_requests_can_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gathering, "available_memory", lambda: 1 << 50)
    raw = {"model": str(DEMO), "worker": {"dtype": "float32", "max_running_requests": 2}}
    tokens = 2 * TEXT["max_position_embeddings"]
    assert gather("here", raw, b"").needs["decode"] == demo_weights() + tokens * TOKEN


# -- the memory of quantised weights ----------------------------------------------------------------

WEIGHTS_ALONE = {"max_total_tokens": 1, "page_size": 16}


def weights_of(path: Path, **options: Any) -> int:
    return worker_bytes(WorkerOptions(model=str(path), **WEIGHTS_ALONE, **options), path, 1 << 40)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    """Of a format: a quantised model, and the same in float32."""
    directory = tmp_path_factory.mktemp("quantised")
    return lambda form: write(OF_ONE_FAMILY.get(form, "qwen3"), directory, 0, form)


def test_a_model_that_cannot_be_divided_as_it_should_be(tmp_path: Path) -> None:
    path = make_tiny("llama", tmp_path, 0)
    assert weights_of(path, tp_size=2) == weights_of(path)
    with pytest.raises(ConfigError, match="tp_size: num_attention_heads is 4"):
        weights_of(path, tp_size=3)


def test_a_model_whose_config_has_no_dtype_is_served_in_that_of_its_files(tmp_path: Path) -> None:
    stored, _ = write("gpt_oss", tmp_path, 0, "mxfp4")
    config = json.loads((stored / "config.json").read_text())
    del config["dtype"]
    (stored / "config.json").write_text(json.dumps(config))
    for path in stored.glob("*.safetensors"):
        tensors = load_file(path)
        halved = {
            name: each.bfloat16() if each.is_floating_point() else each for name, each in tensors.items()
        }
        save_file(halved, path, {"format": "pt"})
    assert weights_of(stored) == weights_of(stored, dtype="bfloat16") < weights_of(stored, dtype="float32")


@pytest.mark.parametrize("form", FORMATS)
def test_weights_that_are_widened_are_as_large_as_if_they_had_never_been_quantised(
    checkpoints: Callable[[str], tuple[Path, Path]], form: str
) -> None:
    stored, exact = checkpoints(form)
    for options in ({"dtype": "float32"}, {"dtype": "bfloat16", "weight_dtype": "bfloat16"}):
        assert weights_of(stored, **options) == weights_of(exact, **options)
    rounded = {"dtype": "bfloat16", "weight_dtype": "int8"}
    assert weights_of(stored, **rounded) == weights_of(exact, **rounded) < weights_of(exact, dtype="bfloat16")


@pytest.mark.parametrize("form", FORMATS)
def test_weights_that_a_kernel_multiplies_as_they_are_stored_are_as_large_as_their_files(
    checkpoints: Callable[[str], tuple[Path, Path]], form: str
) -> None:
    stored, exact = checkpoints(form)
    found = weights_of(stored, dtype="bfloat16")
    if form in ("ct_int8", "gptq_v2"):  # integers of 8 bits are widened
        widened = weights_of(exact, dtype="bfloat16")
        assert widened <= found < 1.05 * widened, "what their scales take is not much"
        return
    tensors = [one for path in stored.glob("*.safetensors") for one in load_file(path).items()]
    whole = {name for each in load_file(exact / "model.safetensors") for name in (each, published_v4(each))}
    plain = [one for name, one in tensors if name in whole and one.is_floating_point() and one.itemsize > 1]
    assert found == sum(one.nbytes for _, one in tensors) - sum(one.nbytes - 2 * one.numel() for one in plain)


def test_only_the_text_part_of_a_model_that_takes_images_counts(tmp_path: Path) -> None:
    weights = load_file(written("gemma3", tmp_path) / "model.safetensors")
    text = [one for name, one in weights.items() if name.startswith("language_model.")]
    assert 0 < len(text) < len(weights)
    assert weights_of(tmp_path) == sum(one.nbytes for one in text)


def test_the_same_weights_in_another_file_do_not_count(tmp_path: Path) -> None:
    """As in Mistral's repositories."""
    _, exact = write("qwen3", tmp_path, 0, "fp8")
    found = weights_of(exact)
    shutil.copy(exact / "model.safetensors", exact / "consolidated.safetensors")
    assert weights_of(exact) == found


# -- the preflight ---------------------------------------------------------------------------------


def test_all_ports_of_a_node_are_reached_and_freed() -> None:
    with Listeners("b", "127.0.0.1", PortOptions(kv="28400-28499"), ["mailboxes", "kv"]) as listeners:
        assert [target.use for target in listeners.targets] == ["mailboxes", "kv"]
        assert 28400 <= listeners.targets[1].port <= 28499
        for _ in range(2):  # one after the other
            assert [reach.problem for reach in connect("a", listeners.targets)] == ["", ""]
    assert {reach.problem for reach in connect("a", listeners.targets)} == {"connection refused"}


def test_something_else_at_the_port_is_told_apart() -> None:
    with Listeners("b", "127.0.0.1", PortOptions(), ["kv"]) as listeners:
        (target,) = listeners.targets
        (reach,) = connect("a", [target._replace(token=b"another")])
    assert reach.problem == "something else answers there"


def test_a_port_that_takes_connections_and_says_nothing_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cluster.doctor.preflight._CONNECT_S", 0.2)
    with (
        Listeners("b", "127.0.0.1", PortOptions(), ["kv"]) as listeners,
        socket.create_server(("127.0.0.1", 0)) as silent,
    ):
        target = listeners.targets[0]._replace(port=silent.getsockname()[1])
        (reach,) = connect("a", [target])
    assert reach.problem == "no answer within 0.2 s"


def test_a_range_without_a_free_port_is_left_to_the_check_of_ports() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ports = PortOptions(kv=str(taken.getsockname()[1]))
        with closing(Listeners("b", "127.0.0.1", ports, ["mailboxes", "kv"])) as listeners:
            assert [target.use for target in listeners.targets] == ["mailboxes"]


def test_listeners_leave_no_thread() -> None:
    before = threading.active_count()
    with Listeners("b", "127.0.0.1", PortOptions(), ["mailboxes", "events", "kv"]):
        assert threading.active_count() == before + 3
    assert threading.active_count() == before
