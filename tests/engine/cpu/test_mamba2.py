"""Fused steps of Mamba-2 layers against transformers' in float64."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import FalconH1Config, GraniteMoeHybridConfig, NemotronHConfig
from transformers.models.falcon_h1.modeling_falcon_h1 import FalconH1Mixer, compute_mup_vector
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHMamba2Mixer

from engine.config import EngineConfig
from engine.cpu.mamba2 import Mamba2
from engine.cpu.module_replacements import CpuReplacements
from engine.cpu.op import current_isa, machine_isas, set_isa
from engine.states import CONV, RECURRENT, SequenceStates
from tests.support.cpu_kernels import packing_isas
from tests.support.state_cuts import check_cuts

packing_isas()  # skipped without any

HIDDEN, SLOTS, KINDS = 64, 7, ["linear_attention", "full_attention"]


def falcon(heads, head_dim, groups, state, act="silu", **more):
    config = FalconH1Config(
        hidden_size=HIDDEN,
        hidden_act=act,
        num_hidden_layers=2,
        mamba_d_ssm=heads * head_dim,
        mamba_n_heads=heads,
        mamba_d_head=head_dim,
        mamba_n_groups=groups,
        mamba_d_state=state,
        ssm_multipliers=[0.9, 0.8, 1.1, 1.2, 0.7],
        ssm_in_multiplier=1.3,
        **more,
    )
    mixer = FalconH1Mixer(config, 0)
    mixer.register_buffer("mup_vector", compute_mup_vector(config), persistent=False)
    return mixer


def granite(heads, head_dim, groups, state):
    assert heads * head_dim == 2 * HIDDEN
    return GraniteMoeHybridMambaLayer(
        GraniteMoeHybridConfig(
            hidden_size=HIDDEN,
            num_hidden_layers=2,
            layer_types=KINDS,
            mamba_n_heads=heads,
            mamba_d_head=head_dim,
            mamba_n_groups=groups,
            mamba_d_state=state,
            mamba_proj_bias=True,
        ),
        0,
    )


def nemotron(heads, head_dim, groups, state, **more):
    return NemotronHMamba2Mixer(
        NemotronHConfig(
            hidden_size=HIDDEN,
            layer_types=KINDS,
            mamba_num_heads=heads,
            mamba_head_dim=head_dim,
            n_groups=groups,
            ssm_state_size=state,
            time_step_min=1e-30,
            **more,
        ),
        0,
    )


def drawn(mixer):
    torch.manual_seed(0)
    for name, parameter in mixer.named_parameters():
        mean = 1.0 if name == "norm.weight" else 0.0
        torch.nn.init.normal_(parameter, mean=mean, std=0.3)
    return mixer.bfloat16().requires_grad_(False)


def replaced(mixer):
    return CpuReplacements().mamba2(mixer, EngineConfig("m"))


CASES = [
    (falcon, (6, 16, 2, 16), {"mamba_rms_norm": True, "mamba_norm_before_gate": False}),
    (falcon, (2, 24, 1, 48), {"mamba_rms_norm": True, "mamba_norm_before_gate": True}),
    (falcon, (3, 32, 1, 256), {"mamba_rms_norm": False}),
    (granite, (8, 16, 1, 128), {}),
    (granite, (4, 32, 2, 32), {}),
    (nemotron, (8, 8, 4, 16), {}),
    (nemotron, (4, 64, 2, 144), {"use_conv_bias": False, "conv_kernel": 2}),
]


@pytest.mark.parametrize("isa", ["avx2", "best"])
@pytest.mark.parametrize("length", [1, 3, 70, 130])
@pytest.mark.parametrize(("make", "dims", "more"), CASES)
def test_tokens_equal_transformers_and_only_their_slots_are_written(make, dims, more, length, isa):
    mixer = drawn(make(*dims, **more))
    want_mixer, rounded_mixer = copy.deepcopy(mixer).double(), copy.deepcopy(mixer)
    got_mixer = replaced(mixer)
    assert isinstance(got_mixer, Mamba2)
    heads, head_dim, _, state_dim = dims
    taps = mixer.conv_kernel_size
    reads, writes = torch.tensor([1, 3, 4]), torch.tensor([2, 3, 6])
    states = {
        CONV: torch.randn(SLOTS, mixer.conv_dim, taps).bfloat16(),
        RECURRENT: torch.randn(SLOTS, heads, head_dim, state_dim),
    }
    before = {name: tensor.clone() for name, tensor in states.items()}
    x = torch.randn(3, length, HIDDEN).bfloat16()

    cache = SequenceStates(taps, {name: tensor[reads].double() for name, tensor in before.items()})
    want = want_mixer(hidden_states=x.double(), cache_params=cache)
    theirs = rounded_mixer(
        hidden_states=x,
        cache_params=SequenceStates(taps, {name: tensor[reads] for name, tensor in before.items()}),
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
    for name, tensor in cache.tensors.items():
        spread = 0.02 * tensor.abs().max().item()
        torch.testing.assert_close(states[name][writes].double(), tensor.double(), rtol=0.02, atol=spread)
        untouched = [slot for slot in range(SLOTS) if slot not in writes]
        assert torch.equal(states[name][untouched], before[name][untouched])


def test_a_row_does_not_depend_on_the_batch():
    """Of more rows than are computed at once."""
    mixer = replaced(drawn(nemotron(4, 16, 2, 32)))
    rows, width = 70, 4 * 16 + 2 * 2 * 32
    states = {CONV: torch.randn(rows + 1, width, 4).bfloat16(), RECURRENT: torch.randn(rows + 1, 4, 16, 32)}
    x = torch.randn(rows, HIDDEN).bfloat16()

    def run(numbers):
        own = {name: tensor.clone() for name, tensor in states.items()}
        slots = torch.tensor(numbers) + 1
        return mixer.run(x[numbers], own, slots, slots), own

    together, after = run(list(range(rows)))
    for row in (0, 1, 63, 64, 69):
        alone, own = run([row])
        assert torch.equal(alone[0], together[row])
        assert torch.equal(own[RECURRENT][row + 1], after[RECURRENT][row + 1])


@pytest.mark.parametrize("has_state", [False, True])
def test_how_a_sequence_is_cut_changes_no_bit(has_state):
    """Neither of its outputs nor of its states. A sequence without a state begins with zeros."""
    mixer = replaced(drawn(granite(8, 16, 1, 48)))
    states = {CONV: torch.randn(3, 224, 4).bfloat16(), RECURRENT: torch.randn(3, 8, 16, 48)}
    x = torch.randn(150, HIDDEN).bfloat16()
    check_cuts(mixer, states, x, has_state, [(1, 2, 147), (64, 86), (100, 49, 1)])


def test_what_cannot_be_fused_is_left_alone():
    assert replaced(nemotron(4, 16, 2, 32).float()) is None
    assert replaced(drawn(nemotron(4, 16, 2, 24))) is None
    assert replaced(drawn(falcon(4, 16, 2, 32, act="gelu"))) is None
    assert replaced(drawn(nemotron(4, 16, 2, 32, conv_kernel=9))) is None
    assert CpuReplacements().mamba2(drawn(nemotron(4, 16, 2, 32)), EngineConfig("m", linear="torch")) is None
