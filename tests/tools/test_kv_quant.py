"""What `make kv-quant` measures: transformers' own loss, on texts held out, with a strict verdict."""

from __future__ import annotations

import re

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from kvcache.quant import KVFormat
from tools.demo_functions import trained_functions
from tools.demo_questions import docstring_corpus
from tools.demo_text import one_line
from tools.kv_quant import MODEL, Loss, Measured, PagedScorer, Text, texts_of, verdict
from tools.kv_quant_text import held_out_docstrings

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def texts() -> list[Text]:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    docstrings = sorted(held_out_docstrings(), key=lambda each: -len(each.text))
    return texts_of(tokenizer, [("Why?", each.text) for each in (*docstrings[40:45], *docstrings[-14:])])


@torch.inference_mode()
def test_the_loss_is_that_of_transformers(texts: list[Text]) -> None:
    """More texts than lanes, of several chunks and of one; decode gives the same."""
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32)
    nats = 0.0
    for text in texts:
        logits = model(torch.tensor([text.ids])).logits[0, text.first - 1 : -1]
        nats += float(
            torch.nn.functional.cross_entropy(logits, torch.tensor(text.ids[text.first :]), reduction="sum")
        )
    scorer = PagedScorer(MODEL, KVFormat.AUTO, max(len(text.ids) for text in texts))
    try:
        for stepped in (False, True):
            loss = scorer.loss(texts, stepped)
            assert loss.tokens == sum(text.counted for text in texts) > 1000
            assert loss.nats == pytest.approx(nats, rel=0.005)  # bfloat16 as served
    finally:
        scorer.close()


def test_the_docstrings_are_held_out() -> None:
    trained = [function.answer for function in trained_functions()]
    words = {one_line(text) for text in docstring_corpus()}
    found = held_out_docstrings()
    assert len({each.text for each in found}) == len(found) > 500
    assert found == held_out_docstrings(), "the measure must not change from run to run"
    for each in found:
        assert each.text not in words
        assert not any(answer in each.text for answer in trained)


def measured(perplexity_change: float, right: int, bytes_per_token: float) -> Measured:
    loss = Loss(100.0 * torch.tensor(2.0 * (1 + perplexity_change)).log().item(), 100)
    return Measured(loss, loss, loss, bytes_per_token, right, 50)


@pytest.mark.parametrize(
    ("change", "right", "code"), [(0.009, 46, 0), (0.011, 48, 1), (-0.011, 48, 1), (0.0, 45, 1), (0.0, 50, 0)]
)
def test_the_verdict_is_of_e4m3_alone(change: float, right: int, code: int) -> None:
    results = {
        KVFormat.AUTO: measured(0.0, 48, 2048),
        KVFormat.FP8_E4M3: measured(change, right, 1024),
        KVFormat.FP8_E5M2: measured(0.5, 3, 1024),
        KVFormat.FP4_E2M1: measured(0.9, 0, 576),
    }
    got, line = verdict(results)
    assert got == code
    assert re.fullmatch(
        r"kv-quant: auto=\S+ e4m3=\S+\([+-]\d+\.\d\d%\) e5m2=\S+ fp4=\S+ \| tokens/GiB "
        r"auto=524288 e4m3=1048576 e5m2=1048576 fp4=1864135",
        line,
    )
