"""Families with state layers against transformers, in float32: tokens, logits, states and their shapes."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    DynamicCache,
    FalconH1Config,
    JambaConfig,
    Lfm2Config,
    NemotronHConfig,
    PretrainedConfig,
    Qwen3NextConfig,
)
from transformers.cache_utils import LinearAttentionLayer

from engine.config import EngineConfig
from engine.errors import UnsupportedModel
from engine.gate import check_model
from engine.loader import load_model
from engine.states import CONV, RECURRENT, SequenceStates
from kvcache.layout import KVGroupSpec, LatentGroupSpec, StateGroupSpec
from tests.support.driver import Driver, open_pools
from tests.support.reference import draw_model, greedy, reference_model
from tests.support.tiny_models import make_tiny

HYBRID = (
    *("bailing_hybrid", "falcon_h1", "glm5_next_text", "kimi_linear", "lfm2", "lfm3"),
    *("nemotron_h", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next"),
)
PAGE, PAGES, TOKENS = 16, 40, 24
_random = random.Random(21)
PROMPTS = [[_random.randrange(256) for _ in range(n)] for n in (1, 2, 37, 150)]
"""Shorter than a convolution; longer than a chunk of transformers' scans."""

Drawn = Callable[[str], tuple[Path, list[list[int]]]]


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Drawn:
    """family -> (directory, greedy answers to PROMPTS)."""
    directory = tmp_path_factory.mktemp("hybrid")
    return cache(lambda family: draw_model(family, directory, 0, PROMPTS, TOKENS))


@pytest.mark.covering
@pytest.mark.parametrize("family", HYBRID)
@pytest.mark.parametrize(
    ("chunk", "stagger"),
    [(1 << 20, 0), (1, 0), (3, 0), (16, 0), (65, 0), (1, 3), (7, 5), (64, 2)],
    ids=lambda value: str(value) if value < 1 << 20 else "whole",
)
def test_greedy_tokens_equal_generate(family: str, chunk: int, stagger: int, drawn: Drawn) -> None:
    """Staggered lanes decode in the forwards in which others prefill. All slots hold NaN at first."""
    path, expected = drawn(family)
    runner, _ = open_pools(path, PAGE, PAGES, attention="auto")
    driver = Driver(runner, PAGES, PAGE, seed=chunk + stagger)
    lanes = [driver.add(prompt) for prompt in reversed(PROMPTS)]
    driver.generate(lanes, TOKENS, chunk, stagger)
    runner.close()
    assert [lane.outputs for lane in lanes] == expected[::-1]


@pytest.mark.parametrize("family", HYBRID)
@pytest.mark.parametrize("overlap", [False, True])
def test_launching_ahead_changes_nothing(family: str, overlap: bool, drawn: Drawn) -> None:
    path, expected = drawn(family)
    runner, _ = open_pools(path, PAGE, PAGES, overlap=overlap)
    driver = Driver(runner, PAGES, PAGE)
    lanes = [driver.add(prompt) for prompt in PROMPTS]
    pending = [runner.launch(driver.batch([(lane, lane.prompt_len) for lane in lanes]))]
    pending += [runner.launch(driver.batch([(lane, 1) for lane in lanes], unknown=True)) for _ in range(12)]
    tokens = np.stack([launched.result(60).tokens for launched in pending], axis=1)
    runner.close()
    assert tokens.tolist() == [answer[:13] for answer in expected]


@pytest.mark.parametrize("family", HYBRID)
@torch.inference_mode()
def test_logits_and_states_are_those_of_transformers(family: str, drawn: Drawn) -> None:
    """A forward at a time: chunks of a prompt beside decode rows, until both have seen the same tokens."""
    path, answers = drawn(family)
    long, short = PROMPTS[3], [*PROMPTS[1], *answers[1]]
    runner, pools = open_pools(path, PAGE, PAGES)
    driver = Driver(runner, PAGES, PAGE)
    lanes = [driver.add(long), driver.add(short)]
    logits = [[], []]
    for sizes in ((50, 2), (1, 1), (2, 1), (97, 3)):
        rows = runner.logits(driver.batch(list(zip(lanes, sizes, strict=True))), np.arange(sum(sizes)))
        for of_lane, part in zip(logits, rows.split(sizes), strict=True):
            of_lane.append(part)
    runner.close()
    stock = reference_model(path, (path / "model.safetensors").stat().st_mtime_ns)
    for lane, parts in zip(lanes, logits, strict=True):
        seen = DynamicCache(config=stock.config)
        want = stock(torch.tensor([lane.context[: lane.done]]), past_key_values=seen).logits[0]
        torch.testing.assert_close(torch.cat(parts), want, rtol=1e-4, atol=1e-4)
        for tensor in runner.spec.groups[-1].tensors:
            layer = seen.layers[tensor.layer]
            state = (layer.conv_states if tensor.name == CONV else layer.recurrent_states)[0]
            got = pools["state"].tensor(tensor.layer, tensor.name)[lane.state_slot]
            torch.testing.assert_close(got, state[0], rtol=1e-4, atol=1e-4)


def _of_a_token(group: Any) -> tuple[int, int]:
    """Heads and width of what transformers caches of a token as its key: of latents, the latent."""
    return (1, group.kv_lora_rank) if group.kind == "latent" else (group.kv_heads, group.head_dim)


@pytest.mark.parametrize("family", HYBRID)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@torch.inference_mode()
def test_groups_are_the_layers_and_tensors_of_transformers(
    family: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    path = make_tiny(family, tmp_path, 0)
    loaded = load_model(EngineConfig(str(path), dtype=str(dtype).removeprefix("torch.")))
    *attention, state = loaded.spec.groups
    assert all(isinstance(group, KVGroupSpec | LatentGroupSpec) for group in attention)
    assert isinstance(state, StateGroupSpec)
    stock: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype)
    seen = DynamicCache(config=stock.config)
    stock(torch.tensor([[1, 2, 3, 4, 5]]), past_key_values=seen)
    wanted = {}
    for number, layer in enumerate(seen.layers):
        if isinstance(layer, LinearAttentionLayer):
            for name, kept in ((CONV, layer.conv_states[0]), (RECURRENT, layer.recurrent_states[0])):
                if kept is not None:
                    wanted[number, name] = (tuple(kept.shape[1:]), kept.dtype)
    assert {(t.layer, t.name): (t.shape, t.dtype) for t in state.tensors} == wanted
    keys = {i: layer.keys for i, layer in enumerate(seen.layers) if getattr(layer, "keys", None) is not None}
    layers = [layer for group in attention for layer in group.layer_ids]
    assert layers == list(keys)
    shapes = {_of_a_token(group) for group in attention}
    assert {(k.shape[1], k.shape[3]) for k in keys.values()} == shapes
    assert len(layers) >= 2
    assert len(state.layer_ids) >= 2


@pytest.mark.parametrize("lengths", [(1, 1, 1, 1, 1), (2, 1, 3), (3, 3), (5, 2, 1), (4, 1), (1, 9)])
def test_a_convolution_is_handed_what_transformers_cache_hands_it(lengths: tuple[int, ...]) -> None:
    ours, theirs = SequenceStates(4, {}), LinearAttentionLayer()
    for length in lengths:
        inputs = torch.randn(2, 3, length)
        got = ours.update_conv_state(inputs, 0, conv_kernel_size=4)
        assert got.equal(theirs.update_conv_state(inputs, conv_kernel_size=4))
        assert ours.tensors[CONV].equal(theirs.conv_states[0])


@pytest.mark.parametrize(
    ("config", "named"),
    [
        (FalconH1Config(time_step_limit=(0.001, 0.1)), r"time_step_limit is \(0.001, 0.1\)"),
        (FalconH1Config(time_step_limit=None), "time_step_limit is None"),
        (
            Qwen3NextConfig(num_hidden_layers=2, layer_types=["linear_attention", "sliding_attention"]),
            "layer_types in config.json holds sliding_attention",
        ),
        (
            Lfm2Config(num_hidden_layers=2, layer_types=["conv", "linear_attention"]),
            "layer_types in config.json holds linear_attention",
        ),
        (
            Lfm2Config(num_hidden_layers=2, layer_types=["conv", "conv"]),
            "no layer in its layer_types attends",
        ),
        (JambaConfig(), "model_type 'jamba'"),
        (NemotronHConfig(time_step_limit=(0.001, 1.0)), r"time_step_limit is \(0.001, 1.0\)"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_would_not_be_exact_is_refused(config: PretrainedConfig, named: str) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        check_model(config)


def test_nemotrons_time_steps_have_no_bound_but_that_of_its_config(drawn: Drawn, tmp_path: Path) -> None:
    """Whatever time_step_min says, from which weights are drawn before training: transformers takes it for a
    bound in prompts, so its tokens are others."""
    path, wanted = drawn("nemotron_h")
    bounded = tmp_path / "bounded"
    shutil.copytree(path, bounded)
    keys = json.loads((bounded / "config.json").read_text())
    (bounded / "config.json").write_text(json.dumps({**keys, "time_step_min": 2.0}))
    model = reference_model(bounded, 0)
    assert [answer.tokens for answer in greedy(model, PROMPTS[-1:], TOKENS)] != wanted[-1:]
    runner, _ = open_pools(bounded, PAGE, PAGES)
    driver = Driver(runner, PAGES, PAGE)
    lanes = [driver.add(prompt) for prompt in PROMPTS]
    driver.generate(lanes, TOKENS, 16)
    runner.close()
    assert [lane.outputs for lane in lanes] == wanted


@pytest.mark.parametrize("family", HYBRID)
def test_the_families_pass_the_gate_as_saved_and_loaded(family: str, drawn: Drawn) -> None:
    """Infinity in config.json and derived fields included."""
    path, _ = drawn(family)
    spec = load_model(EngineConfig(str(path))).spec
    assert spec.model_type == family
    with_latents = {one: ["latent"] for one in ("bailing_hybrid", "glm5_next_text", "kimi_linear")}
    attention = {**with_latents, "lfm3": ["full", "window"]}.get(family, ["full"])
    assert [group.kind for group in spec.groups] == [*attention, "state"]


def poisoned(path: Path, token: int, into: Path) -> Path:
    """The model in `path` with NaN in every expert that `token` does not go through as a prompt."""
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    chosen: dict[Any, set[int]] = {}
    mixtures = [module for module in model.modules() if hasattr(module, "experts")]
    for mixture in mixtures:
        mixture.gate.register_forward_hook(
            lambda _gate, _args, out, key=mixture: chosen.update({key: set(out[2].flatten().tolist())})
        )
    with torch.inference_mode():
        model(torch.tensor([[token]]))
    for mixture in mixtures:
        others = sorted(set(range(mixture.gate.num_experts)) - chosen[mixture])
        assert others
        with torch.no_grad():
            mixture.experts.gate_up_proj[others] = torch.nan
            mixture.experts.down_proj[others] = torch.nan
    model.save_pretrained(into)
    return into


@pytest.mark.parametrize(
    ("dtype", "kind"), [("float32", "torch"), ("bfloat16", "torch"), ("bfloat16", "auto")]
)
@torch.inference_mode()
def test_a_mixture_visits_only_the_experts_hit(dtype: str, kind: str, drawn: Drawn, tmp_path: Path) -> None:
    path, _ = drawn("qwen3_next")
    logits = []
    for model in (path, poisoned(path, 65, tmp_path)):
        runner, _ = open_pools(model, PAGE, PAGES, dtype=dtype, attention=kind, linear=kind)
        driver = Driver(runner, PAGES, PAGE)
        logits.append(runner.logits(driver.batch([(driver.add([65]), 1)]), np.asarray([0])))
        runner.close()
    assert logits[1].isfinite().all()
    assert logits[1].equal(logits[0])
