"""Trains the demo model: a small Qwen3 that answers questions about Python's standard library.

    python -m tools.train_demo --out deploy/demo_model

Seeded and on the CPU: the same interpreter, libraries and thread count give the same weights. Every
CHECKPOINT_EPOCHS the folder holds a complete, usable model; `quality.json` is written before the first step.
"""

from __future__ import annotations

import json
import math
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from common.arguments import ExactParser
from tools.demo_functions import Function, trained_functions
from tools.demo_questions import Message, QuestionMaker, docstring_corpus
from tools.demo_text import (
    HELD_OUT_PHRASINGS,
    TRAINING_PHRASINGS,
    check_held_out,
    draw_functions,
    first_sentence,
    one_line,
)
from tools.demo_tokenizer import END_OF_TEXT, TURN_END, train_tokenizer

CONTEXT = 4096
VOCABULARY = 4096
CHECKPOINT_EPOCHS = 10
IGNORED = -100
MAX_WEIGHT_BYTES = 12_000_000


@dataclass(frozen=True)
class Plan:
    """How long and how hard to train."""

    epochs: int
    batch_size: int
    peak_rate: float
    seed: int
    threads: int


@dataclass(frozen=True)
class Batch:
    """`ids` int64 [rows, length], padded at the end; `labels` the same, IGNORED where nothing is learned."""

    ids: torch.Tensor
    labels: torch.Tensor


def new_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """4.2 M parameters: 4 layers of width 256, 8 query and 4 key/value heads of width 32, tied embeddings."""
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=tokenizer.convert_tokens_to_ids(TURN_END),
        pad_token_id=tokenizer.convert_tokens_to_ids(END_OF_TEXT),
    )
    return Qwen3ForCausalLM(config)


def encode(tokenizer: PreTrainedTokenizerFast, messages: list[Message]) -> tuple[list[int], list[int]]:
    """(token ids, labels) of a conversation: only what the assistant says is learned."""
    ids: list[int] = []
    labels: list[int] = []
    for message in messages:
        head = tokenizer.encode(f"<|im_start|>{message['role']}\n")
        body = [*tokenizer.encode(message["content"]), tokenizer.convert_tokens_to_ids(TURN_END)]
        tail = tokenizer.encode("\n")
        learned = body if message["role"] == "assistant" else [IGNORED] * len(body)
        ids += [*head, *body, *tail]
        labels += [IGNORED] * len(head) + learned + [IGNORED] * len(tail)
    return ids, labels


def epoch_batches(
    maker: QuestionMaker,
    functions: list[Function],
    tokenizer: PreTrainedTokenizerFast,
    size: int,
    rng: random.Random,
) -> Iterator[Batch]:
    """Every function once in a new conversation; rows of like length together, batches in random order."""
    rows = sorted(
        (encode(tokenizer, maker.conversation(function)) for function in functions), key=lambda r: len(r[0])
    )
    groups = [rows[start : start + size] for start in range(0, len(rows), size)]
    rng.shuffle(groups)
    for group in groups:
        length = len(group[-1][0])
        ids = [ids + [0] * (length - len(ids)) for ids, _ in group]
        labels = [labels + [IGNORED] * (length - len(labels)) for _, labels in group]
        yield Batch(torch.tensor(ids), torch.tensor(labels))


def loss_of(model: Qwen3ForCausalLM, batch: Batch) -> torch.Tensor:
    """Mean cross entropy over the learned tokens; logits are computed for those positions only."""
    with torch.autocast("cpu", torch.bfloat16):
        hidden = model.model(batch.ids, use_cache=False).last_hidden_state[:, :-1]
        wanted = batch.labels[:, 1:]
        learned = wanted != IGNORED
        logits = model.lm_head(hidden[learned])
    return functional.cross_entropy(logits.float(), wanted[learned])


def rate_at(step: int, steps: int, peak: float) -> float:
    """Learning rate: 100 steps up, then a cosine down to a fiftieth of the peak."""
    if step < 100:
        return peak * (step + 1) / 100
    return peak * (0.02 + 0.49 * (1 + math.cos(math.pi * (step - 100) / max(steps - 100, 1))))


def train(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    functions: list[Function],
    plan: Plan,
    out: Path,
) -> None:
    """Train in place, print progress with the time left, and save at every checkpoint."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=plan.peak_rate, betas=(0.9, 0.98), weight_decay=0.01, fused=True
    )
    maker = QuestionMaker(functions, plan.seed)
    order = random.Random(plan.seed)
    steps = plan.epochs * math.ceil(len(functions) / plan.batch_size)
    step, started = 0, time.monotonic()
    for epoch in range(1, plan.epochs + 1):
        total = torch.zeros(())
        batches = list(epoch_batches(maker, functions, tokenizer, plan.batch_size, order))
        for batch in batches:
            for group in optimizer.param_groups:
                group["lr"] = rate_at(step, steps, plan.peak_rate)
            loss = loss_of(model, batch)
            loss.backward()  # type: ignore[no-untyped-call]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            total += loss.detach()
            step += 1
        spent = time.monotonic() - started
        left = spent / epoch * (plan.epochs - epoch)
        mean = float(total) / len(batches)
        print(
            f"epoch {epoch}/{plan.epochs}  loss {mean:.4f}  {spent / 60:.1f} min, {left / 60:.1f} left",
            flush=True,
        )
        if epoch % CHECKPOINT_EPOCHS == 0 or epoch == plan.epochs:
            save(model, tokenizer, out)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Write a complete bfloat16 model into `out`; the one being trained stays float32.

    Raises ValueError when the weights are larger than the repository takes.
    """
    copy = Qwen3ForCausalLM(model.config).to(torch.bfloat16)
    copy.load_state_dict(model.state_dict())
    copy.generation_config = GenerationConfig(
        do_sample=False,
        eos_token_id=[model.config.eos_token_id, model.config.pad_token_id],
        pad_token_id=model.config.pad_token_id,
        max_new_tokens=128,
    )
    copy.save_pretrained(out)
    tokenizer.save_pretrained(out)
    size = (out / "model.safetensors").stat().st_size
    if size > MAX_WEIGHT_BYTES:
        raise ValueError(f"the weights take {size} bytes, more than {MAX_WEIGHT_BYTES}")


def write_quality(functions: list[Function], seed: int, out: Path) -> None:
    """Freeze what the check expects; it then depends on no interpreter's docstrings."""
    quality = {
        "seed": seed,
        "training_phrasings": TRAINING_PHRASINGS,
        "held_out_phrasings": HELD_OUT_PHRASINGS,
        "functions": {function.name: first_sentence(function.answer) for function in functions},
    }
    out.mkdir(parents=True, exist_ok=True)
    (out / "quality.json").write_text(json.dumps(quality, indent=1) + "\n")


@torch.inference_mode()
def quality_of(out: Path, functions: list[Function], seed: int, count: int = 50) -> list[int]:
    """Functions answered right, of `count` drawn, per held-out phrasing: greedy, bfloat16, from `out`."""
    model = Qwen3ForCausalLM.from_pretrained(out, dtype=torch.bfloat16).eval()
    tokenizer = PreTrainedTokenizerFast.from_pretrained(out)
    answers = {function.name: first_sentence(function.answer) for function in functions}
    right = []
    for phrasing in HELD_OUT_PHRASINGS:
        good = 0
        for name in draw_functions(answers, seed, count):
            chat = [{"role": "user", "content": phrasing.format(name=name)}]
            prompt = tokenizer.apply_chat_template(
                chat, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
            ids = model.generate(**prompt, do_sample=False, max_new_tokens=128)[
                0, prompt["input_ids"].shape[1] :
            ]
            reply = first_sentence(one_line(tokenizer.decode(ids, skip_special_tokens=True)))
            good += reply == answers[name]
            if reply != answers[name]:
                print(f"wrong: {chat[0]['content']}\n  want {answers[name]}\n  have {reply}")
        right.append(good)
    return right


def main() -> int:
    parser = ExactParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("deploy/demo_model"))
    parser.add_argument("--epochs", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--peak-rate", type=float, default=2e-3)
    parser.add_argument("--seed", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    plan = Plan(args.epochs, args.batch_size, args.peak_rate, args.seed, args.threads)

    check_held_out(TRAINING_PHRASINGS, HELD_OUT_PHRASINGS)
    torch.set_num_threads(plan.threads)
    torch.manual_seed(plan.seed)
    functions = trained_functions()
    asked = QuestionMaker(functions, plan.seed + 1)
    corpus = [*docstring_corpus(), *(asked.question(f) for f in functions for _ in range(6))]
    tokenizer = train_tokenizer([*corpus, *(f.answer for f in functions)], VOCABULARY, CONTEXT)
    model = new_model(tokenizer)
    print(f"{len(functions)} functions, {model.num_parameters() / 1e6:.1f} M parameters", flush=True)
    write_quality(functions, plan.seed, args.out)
    train(model, tokenizer, functions, plan, args.out)
    right = quality_of(args.out, functions, plan.seed)
    print(f"right of 50, for each held-out phrasing: {right}")
    return 0 if min(right) >= 45 else 1


if __name__ == "__main__":
    sys.exit(main())
