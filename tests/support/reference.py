"""What transformers.generate says: the oracle of every token-exact test."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.support.tiny_models import make_tiny

MIN_MARGIN = 1e-4
"""Between the best and the second logit of every step, in standard deviations of its logits.

Below it, the order of a sum may decide.
"""

MIN_INDEX_MARGIN = 1e-6
"""The same of what an indexer chooses, in standard deviations of its scores. It is smaller: a step has a
choice per layer and query, and one that is not clear moves the logits by little."""

REDRAWN: list[str] = []
"""Seeds that draw_model skipped; the end of the test run prints them (tests/conftest.py)."""


@functools.lru_cache(maxsize=8)
def reference_model(path: Path, stamp: int) -> Any:
    """The model as transformers runs it: float32, sdpa if it can, without an end. `stamp` keys the cache."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


@functools.lru_cache(maxsize=512)
def _generate(path: Path, stamp: int, prompt: tuple[int, ...], n: int) -> tuple[tuple[int, ...], float]:
    return greedy(reference_model(path, stamp), prompt, n)


def greedy(model: Any, prompt: Sequence[int], n: int) -> tuple[tuple[int, ...], float]:
    """(n greedy tokens of a transformers model after a prompt, smallest margin of a step)"""
    ids = torch.tensor([list(prompt)])
    with index_margins(model) as chosen:
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=n,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    logits = torch.cat(out.logits).float()
    best = logits.topk(2, dim=-1).values / logits.std(dim=-1, keepdim=True)
    tokens = tuple(out.sequences[0, len(prompt) :].tolist())
    assert len(tokens) == n
    return tokens, min(float((best[:, 0] - best[:, 1]).min()), *chosen, 1.0)


@contextmanager
def index_margins(model: Any) -> Iterator[list[float]]:
    """Of each choice of an indexer (sparse attention) how clear it was: the distance of the last score that
    was chosen from the next one, in MIN_INDEX_MARGIN / MIN_MARGIN standard deviations of a query's scores."""
    indexers = [module for module in model.modules() if type(module).__name__.endswith("Indexer")]
    margins: list[float] = []
    topk = torch.Tensor.topk

    def choose(scores: torch.Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        if k < scores.shape[-1]:
            best = topk(scores, k + 1).values
            spread = scores.masked_fill(scores.isinf(), torch.nan).nan_to_num().std(-1)
            clear = (best[..., -2] - best[..., -1]) / spread
            margins.append(float(clear.nan_to_num(torch.inf).min()) * MIN_MARGIN / MIN_INDEX_MARGIN)
        return topk(scores, k, *args, **kwargs)

    hooks = []
    for module in indexers:
        hooks.append(module.register_forward_pre_hook(lambda *_: setattr(torch.Tensor, "topk", choose)))
        hooks.append(module.register_forward_hook(lambda *_: setattr(torch.Tensor, "topk", topk)))
    try:
        yield margins
    finally:
        for hook in hooks:
            hook.remove()
        torch.Tensor.topk = topk  # type: ignore[method-assign]


def reference_generate(path: Path, prompt_ids: Sequence[int], n: int) -> tuple[list[int], float]:
    """(n greedy tokens after `prompt_ids`, smallest margin of a step). Cached by content and prompt."""
    stamp = (path / "model.safetensors").stat().st_mtime_ns
    tokens, margin = _generate(path, stamp, tuple(prompt_ids), n)
    return list(tokens), margin


@functools.lru_cache(maxsize=1024)
@torch.inference_mode()
def _greedy(path: Path, stamp: int, ids: tuple[int, ...]) -> list[set[int]]:
    model = reference_model(path, stamp)
    logits = model(torch.tensor([ids]), use_cache=False).logits[0].float()
    worst = logits.amax(-1, keepdim=True) - MIN_MARGIN * logits.std(dim=-1, keepdim=True)
    return [set(row.nonzero().flatten().tolist()) for row in logits >= worst]


def reference_greedy(path: Path, ids: Sequence[int]) -> list[set[int]]:
    """After each of `ids` and all before it, the likeliest token, and others within MIN_MARGIN of it.

    One forward. Cached by content and ids.
    """
    return _greedy(path, (path / "model.safetensors").stat().st_mtime_ns, tuple(ids))


def draw_model(
    family: str, directory: Path, seed: int, prompts: Sequence[Sequence[int]], n: int | Sequence[int] = 64
) -> tuple[Path, list[list[int]]]:
    """A tiny model whose greedy answers to `prompts` are decided clearly, and those answers: of n tokens, or
    of n[i] to prompt i.

    Clearly: every margin is at least MIN_MARGIN, and n tokens hold at least n / 4 different ones. A seed
    that does not give that is skipped, and said at the end of the run.
    """
    lengths = [n] * len(prompts) if isinstance(n, int) else n
    for candidate in range(seed, seed + 50):
        path = make_tiny(family, directory, candidate)
        answers: list[list[int]] = []
        for prompt, length in zip(prompts, lengths, strict=True):
            tokens, margin = reference_generate(path, prompt, length)
            if margin < MIN_MARGIN or len(set(tokens)) < length // 4:
                why = "margin" if margin < MIN_MARGIN else "too few distinct tokens"
                REDRAWN.append(f"{family}: seed {candidate} redrawn ({why})")
                break
            answers.append(tokens)
        else:
            return path, answers
    raise AssertionError(f"no clear {family} model in 50 seeds")
