"""Parts of checkpoints: what they have in common is one model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.checkpoint.formats import stored_format
from engine.checkpoint.reader import AddedOnce, Division, read_weights
from engine.config import EngineConfig
from engine.families.dense import head_dim
from engine.loader import load_model
from engine.model_config import read_config
from engine.parallel.shard import Shard
from tests.support.quantised_checkpoints import write
from tests.support.tiny_configs import FAMILIES, MIXED, SIMILAR
from tests.support.tiny_models import make_tiny


@dataclass
class OneOfTwo:
    """A RankGroup that is only loaded."""

    rank: int
    size: int = 2

    def sum(self, summand: torch.Tensor) -> None:
        raise NotImplementedError

    def share(self, values: torch.Tensor) -> None:
        raise NotImplementedError

    def gather(self, part: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def close(self) -> None:
        pass


def parts_of(path: Path, rank: int | None) -> dict[str, torch.Tensor]:
    config = read_config(str(path), local=True)
    shard: Any = {} if rank is None else {"divide": Shard(rank, 2).divide(config)}
    weights = read_weights(str(path), stored_format(config), torch.float32, local=True, keep=False, **shard)
    return {name: weight[...] for name, weight in weights.items()}


@pytest.mark.parametrize(("family", "form"), [("qwen2", None), ("mixtral", None), ("llama", "ct_fp8")])
def test_parts_make_the_whole(family: str, form: str | None, tmp_path: Path) -> None:
    path = make_tiny(family, tmp_path, 0) if form is None else write(family, tmp_path, 0, form)[0]
    whole, first, second = (parts_of(path, rank) for rank in (None, 0, 1))
    divided = 0
    for name, weight in whole.items():
        parts = first[name], second[name]
        if parts[0].shape == weight.shape:
            assert torch.equal(parts[0], weight), name
            assert torch.equal(parts[1], weight), name
            continue
        dim = 1 if name.endswith(("o_proj.weight", "down_proj.weight", "w2.weight")) else 0
        assert torch.equal(torch.cat(parts, dim), weight), name
        divided += 1
    layers = read_config(str(path), local=True).num_hidden_layers
    assert divided >= 7 * layers


@pytest.mark.parametrize(("family", "form"), [("qwen2", None), ("mixtral", None), ("llama", "ct_fp8")])
def test_every_rank_and_a_worker_of_one_serve_the_same_model(
    family: str, form: str | None, tmp_path: Path
) -> None:
    """Prefill and decode may have different numbers of ranks."""
    path, other = (
        make_tiny(family, tmp_path / str(seed), seed)
        if form is None
        else write(family, tmp_path / str(seed), seed, form)[0]
        for seed in (0, 1)
    )
    one = load_model(EngineConfig(str(path)))
    first, second = (load_model(EngineConfig(str(path)), OneOfTwo(rank)) for rank in (0, 1))
    assert one.spec == first.spec == second.spec
    assert one.spec.fingerprint != load_model(EngineConfig(str(other)), OneOfTwo(0)).spec.fingerprint
    heads = one.attention[0].query_heads
    assert [part.attention[0].query_heads for part in (first, second)] == [heads // 2] * 2


@pytest.mark.parametrize(
    ("name", "dim"),
    [
        ("model.layers.0.self_attn.q_proj.weight", 0),
        ("model.layers.0.self_attn.k_proj.bias", 0),
        ("model.layers.0.self_attn.o_proj.weight", 1),
        ("model.layers.0.self_attn.o_proj.bias", None),  # added once, after the sum
        ("model.layers.0.mlp.experts.7.down_proj.weight", 1),
        ("model.layers.0.mlp.shared_expert.up_proj.weight", 0),
        ("model.layers.0.block_sparse_moe.experts.1.w2.weight", 1),
        ("model.layers.0.mlp.gate.weight", None),
        ("model.layers.0.mlp.shared_expert_gate.weight", None),
        ("model.layers.0.self_attn.q_norm.weight", None),
        ("model.embed_tokens.weight", None),
        ("lm_head.weight", None),
    ],
)
def test_what_is_divided_and_how(name: str, dim: int | None) -> None:
    divide = Shard(1, 2).divide(FAMILIES["qwen2_moe"]())
    assert divide(name) == (None if dim is None else Division(dim, 1, 2))


def test_what_is_divided_otherwise() -> None:
    gpt_oss = Shard(1, 2).divide(MIXED["gpt_oss"]())
    assert gpt_oss("model.layers.0.self_attn.sinks") == Division(0, 1, 2)
    assert gpt_oss("model.layers.0.mlp.experts.gate_up_proj") == Division(2, 1, 2)
    assert gpt_oss("model.layers.0.mlp.experts.down_proj_bias") == AddedOnce(1)
    config = FAMILIES["phi3"]()
    heads, kv_heads, dim = config.num_attention_heads, config.num_key_value_heads, head_dim(config)
    assert Shard(1, 2).divide(config)("model.layers.0.self_attn.qkv_proj.weight") == Division(
        0, 1, 2, (heads * dim, kv_heads * dim, kv_heads * dim)
    )


def test_weights_of_two_projections_and_of_norms_of_all_heads() -> None:
    config = SIMILAR["glm4"]()
    divide = Shard(1, 2).divide(config)
    inner = config.intermediate_size
    assert divide("model.layers.0.mlp.gate_up_proj.weight") == Division(0, 1, 2, (inner, inner))
    assert divide("model.layers.0.self_attn.k_proj.bias") == Division(0, 1, 2)
    assert Shard(0, 4).config(config).num_key_value_heads == 1
    divided = [Shard(rank, 4).divide(SIMILAR["minimax_m2"]()) for rank in range(4)]
    for name, parts in (("q_norm", [0, 1, 2, 3]), ("k_norm", [0, 0, 1, 1])):
        found = [divide(f"model.layers.0.self_attn.{name}.weight") for divide in divided]
        assert found == [Division(0, part, max(parts) + 1) for part in parts]


def test_every_rank_computes_linear_attention() -> None:
    olmo, kimi = (Shard(1, 2).divide(config()) for config in (SIMILAR["olmo_hybrid"], MIXED["kimi_linear"]))
    for name in ("q_proj", "o_proj"):
        assert olmo(f"model.layers.0.linear_attn.{name}.weight") is None
        assert kimi(f"model.layers.0.self_attn.{name}.weight") is None
    assert olmo("model.layers.1.self_attn.q_proj.weight") == Division(0, 1, 2)
    assert olmo("model.layers.0.mlp.down_proj.weight") == Division(1, 1, 2)


def test_all_experts_in_one_weight() -> None:
    config = SIMILAR["mistral4"]()
    divide, inner = Shard(1, 2).divide(config), config.moe_intermediate_size
    assert divide("model.layers.2.mlp.experts.gate_up_proj") == Division(1, 1, 2, (inner, inner))
    assert divide("model.layers.2.mlp.experts.down_proj") == Division(2, 1, 2)
    assert divide("model.layers.2.self_attn.kv_b_proj.weight") == Division(0, 1, 2)


def test_fewer_kv_heads_than_ranks_are_each_in_several_parts() -> None:
    config = FAMILIES["qwen2"]()
    assert (config.num_attention_heads, config.num_key_value_heads) == (4, 2)
    parts = [Shard(rank, 4).config(config) for rank in range(4)]
    assert {(part.num_attention_heads, part.num_key_value_heads) for part in parts} == {(1, 1)}
    divided = [Shard(rank, 4).divide(config) for rank in range(4)]
    for name in ("k_proj.weight", "v_proj.bias"):
        found = [divide(f"model.layers.0.self_attn.{name}") for divide in divided]
        assert found == [Division(0, rank, 2) for rank in (0, 0, 1, 1)]


def test_parts_of_several_segments_and_of_what_is_added_once() -> None:
    whole = torch.arange(24).view(12, 2)
    second = Division(0, 1, 2, (4, 2, 6)).of(whole, whole.shape)
    assert second[:, 0].tolist() == [4, 6, 10, 18, 20, 22]
    with pytest.raises(ValueError, match="4 is not divided by 3"):
        Division(0, 1, 3, (6, 4, 2)).of(whole, whole.shape)
    assert torch.equal(AddedOnce(0).of(whole, whole.shape), whole)
    assert not AddedOnce(1).of(whole, whole.shape).any()
