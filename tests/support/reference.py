"""What transformers.generate says: the oracle of every token-exact test."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

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

MIN_INDEX_MARGIN_OF_STATES = 1e-4
"""The same where layers with states come before: a prompt in one piece and token by token gives scores of
GLM-5.3's tiny model that differ by 4e-5 of these, in transformers, too."""

REDRAWN: list[str] = []
"""Seeds that draw_model skipped; the end of the test run prints them (tests/conftest.py)."""


@functools.lru_cache(maxsize=8)
def reference_model(path: Path, stamp: int) -> Any:
    """The model as transformers runs it: float32, sdpa if it can, without an end. `stamp` keys the cache."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, local_files_only=True)
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model.eval()


class Answer(NamedTuple):
    """Greedy tokens, and the smallest margin of a step."""

    tokens: list[int]
    margin: float


def greedy(model: Any, prompts: Sequence[Sequence[int]], n: int) -> list[Answer]:
    """n greedy tokens of a transformers model after each prompt. The prompts are one batch, filled up on
    their left."""
    width = max(map(len, prompts))
    filled = [width - len(prompt) for prompt in prompts]
    with index_margins(model) as chosen:
        out = model.generate(
            torch.tensor([[0] * more + [*prompt] for more, prompt in zip(filled, prompts, strict=True)]),
            attention_mask=torch.tensor([[0] * more + [1] * (width - more) for more in filled]),
            max_new_tokens=n,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
        )
    logits = torch.stack(out.logits, 1).float()
    best = logits.topk(2, dim=-1).values / logits.std(dim=-1, keepdim=True)
    margins = (best[..., 0] - best[..., 1]).amin(-1)
    answers = out.sequences[:, width:]
    assert answers.shape == (len(prompts), n)
    return [
        Answer(tokens, min(margin, *chosen, 1.0))
        for tokens, margin in zip(answers.tolist(), margins.tolist(), strict=True)
    ]


def generate_with(path: Path, prompt: Sequence[int], n: int, **options: Any) -> list[int]:
    """At most n greedy tokens after a prompt, with further options of transformers' generate."""
    model = reference_model(path, (path / "model.safetensors").stat().st_mtime_ns)
    ids = torch.tensor([list(prompt)])
    out = model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=n, do_sample=False, **options
    )
    tokens: list[int] = out[0, len(prompt) :].tolist()
    return tokens


@contextmanager
def index_margins(model: Any) -> Iterator[list[float]]:
    """Of each choice of an indexer (sparse attention) how clear it was: the distance of the last score that
    was chosen from the next one, in standard deviations of a query's scores, as a multiple of what is clear
    enough, in MIN_MARGIN."""
    kinds = getattr(model.config.get_text_config(), "layer_types", None)
    states = "linear_attention" in (kinds or ())
    least = MIN_INDEX_MARGIN_OF_STATES if states else MIN_INDEX_MARGIN
    indexers = [module for module in model.modules() if type(module).__name__.endswith("Indexer")]
    margins: list[float] = []
    topk = torch.Tensor.topk

    def choose(scores: torch.Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        if k < scores.shape[-1]:
            best = topk(scores, k + 1).values
            masked = torch.finfo(scores.dtype).min / 2  # of one kind of mask or the other
            hidden = (scores < masked) | (scores == torch.inf)  # blocks that are chosen in any case
            spread = scores.masked_fill(hidden, torch.nan).nan_to_num().std(-1)
            best = best.masked_fill(best < masked, -torch.inf)
            clear = (best[..., -2] - best[..., -1]) / spread
            margins.append(float(clear.nan_to_num(torch.inf).min()) * MIN_MARGIN / least)
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


_NOT_FILLED_UP = (
    *("bamba", "lfm2", "lfm2_moe", "lfm3", "granitemoehybrid", "deepseek_v32", "glm_moe_dsa"),
    *("llama4_text", "deepseek_v4", "axk2", "hy_v4", "minimax_m3_vl_text", "mistral_large4_text"),
    "glm5_next_text",
)
"""What fills a prompt up changes the states of these models, or the positions by which Llama 4 scales, or
what DeepSeek-V4's entries are made of, or what the margins of an indexer are of. Only neighbours of one
length are a batch."""

_answers: dict[tuple[Path, int, tuple[int, ...], int], Answer] = {}
_MOST_ANSWERS = 512


def reference_answers(path: Path, prompts: Sequence[Sequence[int]], n: int) -> list[Answer]:
    """n greedy tokens after each prompt. Cached by content and prompt.

    A batch takes transformers about as long as one prompt. The order of its sums differs, which MIN_MARGIN
    allows for.
    """
    stamp = (path / "model.safetensors").stat().st_mtime_ns
    keys = [(path, stamp, tuple(prompt), n) for prompt in prompts]
    missing = [key for key in dict.fromkeys(keys) if key not in _answers]
    if missing:
        model = reference_model(path, stamp)
        fills_up = model.config.model_type not in _NOT_FILLED_UP
        for _, same in groupby(missing, lambda key: 0 if fills_up else len(key[2])):
            batch = list(same)
            found = greedy(model, [prompt for _, _, prompt, _ in batch], n)
            _answers.update(zip(batch, found, strict=True))
    answers = [_answers[key] for key in keys]
    for key in list(_answers)[:-_MOST_ANSWERS]:
        del _answers[key]
    return answers


def reference_generate(path: Path, prompt_ids: Sequence[int], n: int) -> Answer:
    """n greedy tokens after `prompt_ids`. Cached by content and prompt."""
    (answer,) = reference_answers(path, [prompt_ids], n)
    return answer


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
        found: dict[int, Answer] = {}
        for length in set(lengths):
            asked = [i for i, one in enumerate(lengths) if one == length]
            answers = reference_answers(path, [prompts[i] for i in asked], length)
            found.update(zip(asked, answers, strict=True))
        if min(answer.margin for answer in found.values()) < MIN_MARGIN:
            REDRAWN.append(f"{family}: seed {candidate} redrawn (margin)")
        elif any(len(set(answer.tokens)) < lengths[i] // 4 for i, answer in found.items()):
            REDRAWN.append(f"{family}: seed {candidate} redrawn (too few distinct tokens)")
        else:
            return path, [found[i].tokens for i in range(len(prompts))]
    raise AssertionError(f"no clear {family} model in 50 seeds")
