"""Weights that stay stored on a GPU: the kernel against its definition, and models with them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.cuda.stored_experts import tiles_of
from engine.cuda.stored_product import stored_product
from engine.graphs import DecodeLimits
from tests.engine.cuda.test_stored_kernel import FORMS, weights
from tests.engine.cuda.test_stored_weights import FROM_WIDENED
from tests.support.driver import Driver, open_pools
from tests.support.quantised_checkpoints import write

PAGE, PAGES = 16, 40
MODELS = [
    ("qwen3", "fp8_wide"),
    ("qwen3_moe", "fp8_wide"),
    ("deepseek_v3", "fp8_wide"),
    ("gpt_oss", "mxfp4"),
    ("qwen3", "modelopt_nvfp4"),
    ("mixtral", "ct_nvfp4"),
    ("qwen3", "awq"),
    ("qwen3_moe", "gptq"),
]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rows", [1, 16, 17, 40, 130, 700])
def test_the_kernel_computes_its_definition(rows: int, form: str, dtype: torch.dtype, device: str) -> None:
    torch.manual_seed(rows)
    coded = weights(form, 4, 200, 416)
    x = torch.randn(rows, 416).to(dtype)
    for experts in (None, torch.randint(0, 4, (rows,))):
        tiles = (None, None) if experts is None else tiles_of(experts, 4)
        some = [each if each is None or experts is not None else each[:1] for each in coded]
        want = stored_product(x, *some, *tiles, 1, rows).float()
        on_gpu = [None if each is None else each.to(device) for each in (x, *some, *tiles)]
        got = stored_product(*on_gpu, 1, rows).float().cpu()
        rounding = torch.finfo(dtype).eps
        assert ((got - want).abs() <= rounding * want.abs() + rounding * want.abs().mean()).all()


@pytest.mark.parametrize(("family", "form"), MODELS)
def test_logits_are_within_the_bound_and_steps_are_recorded(
    family: str, form: str, device: str, tmp_path: Path
) -> None:
    stored, exact = write(family, tmp_path, 0, form)
    ids = np.random.default_rng(2).integers(0, 256, 60).tolist()
    with torch.inference_mode():
        want = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float32)(torch.tensor([ids])).logits[0]
        theirs = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.bfloat16)(torch.tensor([ids]))
    runner, _ = open_pools(stored, PAGE, PAGES, "bfloat16", "auto", "auto", False, device)
    named = {"awq": "int4", "gptq": "int4", "modelopt_nvfp4": "nvfp4", "ct_nvfp4": "nvfp4"}
    assert runner.kept_formats == (named.get(form, form.partition("_")[0]),)
    driver = Driver(runner, PAGES, PAGE)
    lane = driver.add(ids)
    with torch.inference_mode():
        chunks = [runner.logits(driver.batch([(lane, n)]), np.arange(n)) for n in (40, 1, 19)]
    ours = (torch.cat(chunks).float().cpu() - want).norm()
    assert ours <= FROM_WIDENED * (theirs.logits[0].float() - want).norm()
    runner.record_decode(DecodeLimits(sequences=2, context_pages=6, rows=2))
    runner.close()
