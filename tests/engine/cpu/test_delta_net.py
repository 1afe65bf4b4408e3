"""Fused steps of gated delta nets, and of Kimi's delta attention, against transformers' in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import (
    BailingHybridConfig,
    KimiLinearConfig,
    OlmoHybridConfig,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)
from transformers.models.bailing_hybrid.modeling_bailing_hybrid import BailingHybridDeltaAttention
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention
from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeGatedDeltaNet
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from engine.config import EngineConfig
from engine.cpu.delta_net import DeltaNet
from engine.cpu.module_replacements import CpuReplacements
from engine.cpu.op import current_isa, machine_isas, set_isa
from engine.states import CONV, RECURRENT, SequenceStates
from tests.support.cpu_kernels import packing_isas
from tests.support.state_cuts import check_cuts

packing_isas()  # skipped without any

KINDS = {
    "qwen3_next": (Qwen3NextConfig, Qwen3NextGatedDeltaNet),
    "qwen3_5": (Qwen3_5TextConfig, Qwen3_5GatedDeltaNet),
    "qwen3_5_moe": (Qwen3_5MoeTextConfig, Qwen3_5MoeGatedDeltaNet),
    "kimi": (KimiLinearConfig, KimiLinearDeltaAttention),
    "ling": (BailingHybridConfig, BailingHybridDeltaAttention),
    "olmo": (OlmoHybridConfig, OlmoHybridGatedDeltaNet),
}
HIDDEN, SLOTS = 64, 7


def make_mixer(kind="qwen3_next", key_heads=2, value_heads=6, key_dim=32, value_dim=144, act="silu"):
    torch.manual_seed(0)
    config_class, mixer_class = KINDS[kind]
    if kind == "kimi":
        shape = {"linear_num_heads": key_heads, "linear_head_dim": key_dim}
    elif kind == "ling":
        shape = {"num_attention_heads": key_heads, "head_dim": key_dim}
    else:
        shape = {
            "linear_num_key_heads": key_heads,
            "linear_num_value_heads": value_heads,
            "linear_key_head_dim": key_dim,
            "linear_value_head_dim": value_dim,
        }
    config = config_class(
        hidden_size=HIDDEN,
        hidden_act=act,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        **shape,
    )
    mixer = mixer_class(config, 0)
    for name, parameter in mixer.named_parameters():
        if kind in ("kimi", "ling") or name != "A_log":
            torch.nn.init.normal_(parameter, std=0.3)
    return mixer.bfloat16().requires_grad_(False)


def replaced(mixer):
    return CpuReplacements().delta_net(mixer, EngineConfig("m"))


@pytest.mark.parametrize("isa", ["avx2", "best"])
@pytest.mark.parametrize("length", [1, 3, 70])
@pytest.mark.parametrize(
    ("kind", "heads", "dims"),
    [
        ("qwen3_next", (2, 6), (32, 144)),
        ("qwen3_5", (2, 2), (64, 128)),
        ("qwen3_5", (1, 4), (16, 16)),
        ("qwen3_5_moe", (2, 4), (32, 32)),
        ("kimi", (3, 3), (32, 32)),
        ("kimi", (2, 2), (144, 144)),
        ("ling", (3, 3), (32, 32)),
        ("olmo", (2, 2), (48, 96)),
        ("olmo", (1, 3), (32, 64)),
    ],
)
def test_tokens_equal_transformers_and_only_their_slots_are_written(kind, heads, dims, length, isa):
    mixer = make_mixer(kind, *heads, *dims)
    want_mixer, rounded_mixer = copy.deepcopy(mixer).double(), copy.deepcopy(mixer)
    got_mixer = replaced(mixer)
    assert isinstance(got_mixer, DeltaNet)
    reads, writes = torch.tensor([1, 3, 4]), torch.tensor([2, 3, 6])
    states = {
        CONV: torch.randn(SLOTS, mixer.conv_dim, 4).bfloat16(),
        RECURRENT: torch.randn(SLOTS, heads[1], *dims),
    }
    before = {name: tensor.clone() for name, tensor in states.items()}
    x = torch.randn(3, length, HIDDEN).bfloat16()
    cache = SequenceStates(4, {name: tensor[reads].double() for name, tensor in before.items()})
    want = want_mixer(hidden_states=x.double(), cache_params=cache)
    theirs = rounded_mixer(
        hidden_states=x,
        cache_params=SequenceStates(4, {name: tensor[reads] for name, tensor in before.items()}),
    )
    best = current_isa()
    set_isa(machine_isas()[-1] if isa == "best" else isa)
    try:
        got = got_mixer.run(x.flatten(0, 1), states, reads, writes).view(x.shape)
    finally:
        set_isa(best)
    assert got.dtype == torch.bfloat16
    errors, theirs = (got - want).abs(), (theirs - want).abs()
    assert errors.max() <= max(1.2 * theirs.max(), 0.01 * want.abs().max())
    assert errors.mean() <= max(1.2 * theirs.mean(), 0.003 * want.abs().mean())
    for name, after in cache.tensors.items():
        spread = 0.02 * after.abs().max().item()
        torch.testing.assert_close(states[name][writes].double(), after.double(), rtol=0.02, atol=spread)
        untouched = [slot for slot in range(SLOTS) if slot not in writes]
        assert torch.equal(states[name][untouched], before[name][untouched])


def test_a_row_does_not_depend_on_the_batch():
    mixer = replaced(make_mixer())
    states = {CONV: torch.randn(5, 992, 4).bfloat16(), RECURRENT: torch.randn(5, 6, 32, 144)}
    x = torch.randn(4, HIDDEN).bfloat16()

    def run(rows):
        own = {name: tensor.clone() for name, tensor in states.items()}
        slots = torch.tensor(rows) + 1
        return mixer.run(x[rows], own, slots, slots), own

    together, after = run([0, 1, 2, 3])
    for row in range(4):
        alone, own = run([row])
        assert torch.equal(alone[0], together[row])
        assert torch.equal(own[RECURRENT][row + 1], after[RECURRENT][row + 1])


@pytest.mark.parametrize("kind", ["qwen3_next", "kimi"])
@pytest.mark.parametrize("has_state", [False, True])
def test_how_a_sequence_is_cut_changes_no_bit(kind, has_state):
    """Neither of its outputs nor of its states. A sequence without a state begins with zeros."""
    mixer = replaced(make_mixer(kind, 2, 4, 32, 48))
    conv, recurrent = mixer.mixer.conv_dim, (2 if kind == "kimi" else 4, 32, 32 if kind == "kimi" else 48)
    states = {CONV: torch.randn(3, conv, 4).bfloat16(), RECURRENT: torch.randn(3, *recurrent)}
    x = torch.randn(8, HIDDEN).bfloat16()
    check_cuts(mixer, states, x, has_state, [(1,) * 8, (2, 6), (5, 1, 2)])


def test_what_cannot_be_fused_is_left_alone():
    assert replaced(make_mixer().float()) is None
    assert replaced(make_mixer(value_dim=24)) is None
    assert replaced(make_mixer("kimi", key_dim=24)) is None
    assert replaced(make_mixer(act="gelu")) is None
    assert CpuReplacements().delta_net(make_mixer(), EngineConfig("m", linear="torch")) is None
