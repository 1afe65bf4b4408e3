"""Checkpoints in fp8, MXFP4, NVFP4 and int4, in bfloat16 on a CPU: weights stay so, and logits are right."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.config import EngineConfig
from engine.cpu.linear import Packer, PackFormat
from engine.cpu.op import set_isa
from engine.loader import load_model
from tests.engine.conftest import PROMPTS
from tests.engine.cpu.test_int8_weights import logits, share
from tests.support.cpu_kernels import packing_isas
from tests.support.hand_off import pair
from tests.support.quantised_checkpoints import write

ISAS = packing_isas()
KEPT = {
    ("qwen3", "fp8_wide"): (PackFormat.FP8, 12, 1),
    ("llama", "ct_fp8"): (PackFormat.FP8, 12, 1),
    ("llama", "fp8"): (PackFormat.FP8, 0, 13),  # blocks of 24 inputs
    ("qwen3_moe", "fp8_wide"): (PackFormat.FP8, 8, 3),
    ("mixtral", "fp8_wide"): (PackFormat.FP8, 12, 4),
    ("deepseek_v3", "fp8_wide"): (PackFormat.FP8, 20, 5),
    ("qwen3_next", "fp8_wide"): (PackFormat.FP8, 26, 9),
    ("gpt_oss", "mxfp4"): (PackFormat.MXFP4, 8, 13),  # experts
    ("deepseek_v4", "fp8_fp4"): (PackFormat.MXFP4, 10, 55),  # experts; blocks of fp8 have 24 inputs
    ("qwen3", "modelopt_nvfp4"): (PackFormat.NVFP4, 12, 1),
    ("mixtral", "ct_nvfp4"): (PackFormat.NVFP4, 12, 4),
    ("mixtral", "ct_mxfp4"): (PackFormat.MXFP4, 12, 4),
    ("llama", "awq"): (PackFormat.INT4_BY_32, 12, 1),
    ("mixtral", "awq"): (PackFormat.INT4_BY_32, 12, 4),
    ("phi3", "gptq"): (PackFormat.INT4_BY_32, 12, 1),
    ("qwen3", "gptq_desc_act"): (PackFormat.INT4_BY_32, 0, 13),  # groups are not of neighbours
    ("qwen3_moe", "ct_int4_zeros"): (PackFormat.INT4_BY_128, 8, 3),
}
"""What is kept, in how many packs, and how many hold bfloat16. lm_head's and routers' always do."""
DENSE, FROM_WIDENED, MIXTURE_FROM_WIDENED = 0.04, 1.1, 2.0
"""Of logits, from transformers in float32 with the dequantised weights: the length of the difference, as a
share of the logits' length. Of dense models at most DENSE (0.012 to 0.026 were measured), and FROM_WIDENED
times that of the same checkpoint with its weights widened to bfloat16; of mixtures MIXTURE_FROM_WIDENED times
that (1.01 was measured): there a router near a tie chooses other experts, on each instruction set in its own
way."""
cases = pytest.mark.parametrize(("family", "form"), KEPT, ids=map("-".join, KEPT))


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def packs(monkeypatch):
    """The formats of the packs that are made."""
    made, pack = [], Packer.pack

    def noted(*arguments):
        made.append(pack(*arguments))
        return made[-1]

    monkeypatch.setattr(Packer, "pack", noted)
    return made


@cases
def test_packs_hold_what_the_checkpoint_stored(family, form, directory, packs):
    stored, _ = write(family, directory, 0, form)
    loaded = load_model(EngineConfig(str(stored), dtype="bfloat16"))
    forms = [pack.form for pack in packs]
    kept, *counts = KEPT[family, form]
    assert [forms.count(kept), sum(form.of_checkpoint is None for form in forms)] == counts
    assert sum(counts) == len(forms)
    assert loaded.kept == ((kept.of_checkpoint,) if counts[0] else ())
    packs.clear()
    assert load_model(EngineConfig(str(stored), dtype="bfloat16", weight_dtype="bfloat16")).kept == ()
    assert {pack.form for pack in packs} == {PackFormat.BFLOAT16}


@pytest.mark.covering
@cases
@pytest.mark.parametrize("isa", ISAS)
def test_logits_are_within_the_bounds(family, form, isa, directory):
    stored, exact = write(family, directory, 0, form)
    ids = np.random.default_rng(2).integers(0, 256, 120).tolist()
    model = AutoModelForCausalLM.from_pretrained(exact, dtype=torch.float32)
    with torch.inference_mode():
        want = model(torch.tensor([ids])).logits[0]
    set_isa(isa)
    try:
        for chunk in (1000, 7):  # many rows, and few
            widened = share(logits(stored, ids, "bfloat16", chunk), want)
            kept = share(logits(stored, ids, "auto", chunk), want)
            if family in ("qwen3", "llama"):
                assert kept <= min(DENSE, FROM_WIDENED * widened)
            else:
                assert kept <= MIXTURE_FROM_WIDENED * widened
    finally:
        set_isa(ISAS[-1])


def test_both_are_one_model_to_their_peers(directory):
    stored, _ = write("qwen3", directory, 0, "fp8_wide")
    configs = [EngineConfig(str(stored), "bfloat16", kind) for kind in ("auto", "bfloat16")]
    assert len({load_model(config).spec.fingerprint for config in configs}) == 1


@pytest.mark.parametrize(
    ("family", "form"),
    [("qwen3", "fp8_wide"), ("gpt_oss", "mxfp4"), ("qwen3", "modelopt_nvfp4"), ("llama", "awq")],
)
def test_prefill_and_decode_apart_answer_as_one_worker_does(family, form, directory):
    """One request at a time, so that both compute the same rows together: then bfloat16 has the same bits."""
    stored, _ = write(family, directory, 0, form)
    answers = []
    for split in (True, False):
        with pair(
            model=str(stored),
            dtype="bfloat16",
            engine="transformers",
            threads=1,
            page_size=16,
            max_total_tokens=2048,
            max_context_tokens=512,
        ) as both:
            for room, prompt in enumerate(PROMPTS, 1):
                both.ask(room, prompt, 24, split)
                both.run_dry()
            answers.append([both.outputs[room].tokens for room in range(1, len(PROMPTS) + 1)])
            both.settle(60.0)
    assert answers[0] == answers[1]
    assert all(len(tokens) == 24 for tokens in answers[0])
