"""How the demo model is trained, and what is shipped of it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

from tools.demo_functions import Function
from tools.demo_questions import QuestionMaker
from tools.demo_tokenizer import train_tokenizer
from tools.train_demo import (
    IGNORED,
    MAX_WEIGHT_BYTES,
    encode,
    epoch_batches,
    loss_of,
    new_model,
    quality_of,
    rate_at,
    save,
)

SHIPPED = Path(__file__).resolve().parents[2] / "deploy" / "demo_model"
FUNCTIONS = [
    Function("os.path.join", "Join two paths."),
    Function("str.upper", "Return a copy in capitals, whatever it was before."),
    Function("len", "Return the number of items."),
]
CHAT = [{"role": "user", "content": "What is len?"}, {"role": "assistant", "content": "It counts."}]


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    maker = QuestionMaker(FUNCTIONS, 1)
    corpus = [message["content"] for function in FUNCTIONS for message in maker.conversation(function)]
    return train_tokenizer(corpus, 300, 128)


def test_training_sees_what_the_chat_template_renders(tokenizer: PreTrainedTokenizerFast) -> None:
    ids, labels = encode(tokenizer, CHAT)
    assert ids == tokenizer.apply_chat_template(CHAT, return_dict=True)["input_ids"]
    prompt = tokenizer.apply_chat_template(CHAT[:1], add_generation_prompt=True, return_dict=True)[
        "input_ids"
    ]
    assert ids[: len(prompt)] == prompt
    learned = [label for label in labels if label != IGNORED]
    assert tokenizer.decode(learned) == "It counts.<|im_end|>"
    assert labels[: len(prompt)] == [IGNORED] * len(prompt)


def test_a_dotted_name_is_cut_alike_wherever_it_stands(tokenizer: PreTrainedTokenizerFast) -> None:
    pieces = tokenizer.tokenize("use os.path.join")
    assert pieces[-len(tokenizer.tokenize(".path.join")) :] == tokenizer.tokenize(".path.join")
    assert tokenizer.decode(tokenizer.encode("naïve `x`\n\n 42 ✓")) == "naïve `x`\n\n 42 ✓"


def test_an_epoch_asks_about_every_function_once(tokenizer: PreTrainedTokenizerFast) -> None:
    maker = QuestionMaker(FUNCTIONS, 2)
    batches = list(epoch_batches(maker, FUNCTIONS, tokenizer, 2, random.Random(0)))
    assert sorted(len(batch.ids) for batch in batches) == [1, 2]
    for batch in batches:
        assert batch.ids.shape == batch.labels.shape
        assert (batch.labels[batch.labels != IGNORED] == batch.ids[batch.labels != IGNORED]).all()


def test_a_step_down_the_gradient_lowers_the_loss(tokenizer: PreTrainedTokenizerFast) -> None:
    torch.manual_seed(0)
    model = new_model(tokenizer)
    batch = next(epoch_batches(QuestionMaker(FUNCTIONS, 3), FUNCTIONS, tokenizer, 3, random.Random(0)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = loss_of(model, batch)
    before.backward()
    optimizer.step()
    assert loss_of(model, batch) < before


def test_the_rate_rises_then_falls_to_a_fiftieth() -> None:
    rates = [rate_at(step, 1000, 1.0) for step in range(1001)]
    assert rates[99] == rates[100] == max(rates) == 1.0
    assert rates[:100] == sorted(rates[:100])
    assert rates[100:] == sorted(rates[100:], reverse=True)
    assert rates[-1] == pytest.approx(0.02)


def test_what_is_saved_is_complete_and_bfloat16(tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    model = new_model(tokenizer)
    save(model, tokenizer, tmp_path)
    loaded = Qwen3ForCausalLM.from_pretrained(tmp_path)
    assert loaded.dtype == torch.bfloat16
    assert model.dtype == torch.float32
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight.bfloat16())
    again = PreTrainedTokenizerFast.from_pretrained(tmp_path)
    assert again.apply_chat_template(CHAT, tokenize=False) == tokenizer.apply_chat_template(
        CHAT, tokenize=False
    )


@pytest.mark.slow
def test_the_shipped_model_answers_in_words_it_was_not_trained_on() -> None:
    assert sum(file.stat().st_size for file in SHIPPED.glob("*.safetensors")) <= MAX_WEIGHT_BYTES
    assert json.loads((SHIPPED / "config.json").read_text())["model_type"] == "qwen3"
    frozen = json.loads((SHIPPED / "quality.json").read_text())
    functions = [Function(name, sentence) for name, sentence in frozen["functions"].items()]
    assert min(quality_of(SHIPPED, functions, frozen["seed"], count=5)) >= 4
