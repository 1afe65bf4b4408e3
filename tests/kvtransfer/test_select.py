"""Which backend a pair of workers takes, and what is refused by name."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import pytest
import torch

from common.errors import ConfigError, TransferError
from kvcache.layout import KVGroupSpec, LatentGroupSpec, StateGroupSpec, StateTensor
from kvcache.quant import KVFormat
from kvtransfer import mooncake_engine
from kvtransfer.mooncake_engine import _devices
from kvtransfer.select import open_receiver, open_sender
from tests.kvtransfer.peers import SHORT, pool, receiving
from wire.messages.transfer import KVTarget, TransferEndpoint
from wire.records import layout_digest

SPEC = KVGroupSpec(layer_ids=(0, 1), kv_heads=2, head_dim=8, dtype=torch.bfloat16)


def target(host: str, *backends: str) -> KVTarget:
    return KVTarget(1, 0, "decode-1", host, "layout", [TransferEndpoint(b, "") for b in backends], {}, 0)


def test_auto_offers_shared_memory_first_and_tcp_last() -> None:
    with receiving("auto", 4, 64) as (receiver, _):
        assert receiver.backends == ("shm", "tcp")
    private = open_receiver({"full": pool(4, 64)}, "auto", bounds=SHORT)
    assert private.backends == ("tcp",)
    private.close()


def test_prefill_takes_the_first_that_works_from_where_it_is() -> None:
    sender = open_sender({"full": pool(4, 64)}, "here", "auto", bounds=SHORT)
    assert sender.backends == ("shm", "tcp")
    assert sender.choose(target("here", "shm", "tcp")).backend == "shm"
    assert sender.choose(target("there", "shm", "tcp")).backend == "tcp"
    assert sender.choose(target("here", "mooncake", "tcp")).backend == "tcp"
    with pytest.raises(TransferError, match="on another host offers shm; this worker can use shm, tcp"):
        sender.choose(target("there", "shm"))
    sender.close()


def test_an_override_narrows_to_one() -> None:
    sender = open_sender({"full": pool(4, 64)}, "here", "tcp", bounds=SHORT)
    assert sender.choose(target("here", "shm", "tcp")).backend == "tcp"
    sender.close()
    with pytest.raises(ConfigError, match="not in one"):
        open_receiver({"full": pool(4, 64)}, "shm")


@pytest.mark.parametrize(
    "opening", [lambda: open_receiver({}, "infiniband"), lambda: open_sender({}, "h", "nixl")]
)
def test_an_unknown_backend_is_answered_with_the_valid_ones(opening: Any) -> None:
    with pytest.raises(ConfigError, match="auto, cuda_ipc, shm, mooncake, tcp") as caught:
        opening()
    assert caught.value.key == "kv_transfer_backend"


def test_an_interface_that_is_not_ours_is_a_config_error() -> None:
    with pytest.raises(ConfigError, match=r"192\.0\.2\.77"):
        open_receiver({"full": pool(4, 64)}, "tcp", interface="192.0.2.77")


@pytest.mark.parametrize(
    "change",
    [
        {"page_size": 32},
        {"dtype": "float32"},
        {"tile_order": "dot_pairs"},
        {"shape": (2, 2, 4, 16, 8)},
        {"name": "window"},
    ],
)
def test_layouts_that_differ_have_different_digests(change: dict[str, Any]) -> None:
    mine = (SPEC.to_layout(16), replace(SPEC, name="second").to_layout(16))
    assert layout_digest(mine) == layout_digest((SPEC.to_layout(16), mine[1]))
    assert layout_digest(mine) != layout_digest((msgspec.structs.replace(mine[0], **change), mine[1]))


@pytest.mark.parametrize("spec", [replace(SPEC, head_dim=16), LatentGroupSpec((0,), 16, 16, torch.bfloat16)])
def test_pools_of_different_dtypes_refuse_each_other(spec: KVGroupSpec | LatentGroupSpec) -> None:
    """The same model with KV in another format: the bytes of one cannot be read by the other."""
    stored = [replace(spec, stored=form) for form in KVFormat]
    digests = {layout_digest((spec.to_layout(16),)) for spec in [*stored, replace(spec, dtype=torch.float32)]}
    assert len(digests) == len(KVFormat) + 1


@pytest.mark.parametrize(
    "tensors",
    [
        (StateTensor(0, "conv", (4, 3), torch.bfloat16), StateTensor(0, "ssm", (2, 8), torch.float32)),
        (StateTensor(0, "conv", (3, 4), torch.float32), StateTensor(0, "ssm", (2, 8), torch.float32)),
        (StateTensor(0, "ssm", (2, 8), torch.float32), StateTensor(0, "conv", (4, 3), torch.float32)),
        (StateTensor(0, "conv", (4, 3), torch.float32), StateTensor(1, "ssm", (2, 8), torch.float32)),
    ],
    ids=["dtype", "shape", "order", "layer"],
)
def test_states_must_be_laid_out_alike(tensors: tuple[StateTensor, ...]) -> None:
    conv, ssm = StateTensor(0, "conv", (4, 3), torch.float32), StateTensor(0, "ssm", (2, 8), torch.float32)
    mine = SPEC.to_layout(16), StateGroupSpec((conv, ssm)).to_layout(16)
    assert layout_digest(mine) != layout_digest((mine[0], StateGroupSpec(tensors).to_layout(16)))
    assert layout_digest(mine) == layout_digest((mine[0], StateGroupSpec((conv, ssm)).to_layout(16)))


def test_rdma_is_what_the_topology_shows() -> None:
    assert list(_devices({"cpu:0": [[], []]})) == []
    assert list(_devices({"cpu:0": [["mlx5_0"], ["mlx5_1"]]})) == ["mlx5_0", "mlx5_1"]


def test_mooncake_that_cannot_be_loaded_is_a_config_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "mooncake.engine", None)
    with pytest.raises(ConfigError, match="or use tcp") as caught:
        mooncake_engine.MooncakeEngine("127.0.0.1", 1.0)
    assert caught.value.key == "kv_transfer_backend"
