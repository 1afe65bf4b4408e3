"""Drawing a token of each row of scores: on CUDA a Triton kernel, elsewhere its definition, with which tests
compare the kernel and run models on a CPU. engine/sampling_block.py computes the same in operators of torch,
more than a hundred of them."""

from __future__ import annotations

from typing import Any

import torch

from engine.cuda import triton_kernels
from engine.noise import gumbel, noise_keys


def draws_by_kernel(device: torch.device) -> bool:
    """Whether tokens are drawn with `draw` on this device."""
    return device.type == "cuda" and triton_kernels.available()


def load_draw(vocab: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile the kernel, which takes seconds, before a request needs it: for logits in `dtype`, and for
    scores that penalties and the like have changed. Nothing to do where draws_by_kernel() is false."""
    if not draws_by_kernel(device):
        return
    ones, none = torch.ones(1, 1, device=device), torch.zeros(1, dtype=torch.int64, device=device)
    for each in (dtype, torch.float32):
        scores = torch.zeros(1, vocab, dtype=each, device=device)
        draw(scores, ones, None, None, None, None, ones, none, none)


@torch.library.custom_op("baton::draw", mutates_args=())
def draw(
    scores: torch.Tensor,
    temperatures: torch.Tensor,
    kth: torch.Tensor | None,
    top_k: torch.Tensor | None,
    may_drop: torch.Tensor | None,
    lowest: torch.Tensor | None,
    is_drawn: torch.Tensor,
    streams: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(tokens int64 [R], is_valid bool [R]) of scores [R, vocab], any float dtype.

    A row is valid if its best score is finite. Scores are taken relative to it and divided by `temperatures`.
    Tokens below the `kth` best score are dropped where `top_k` is not 0, then the least likely ones that have
    at most `may_drop` of the probability, then those whose score is below `lowest`. The token with the best
    sum of score and noise is drawn; noise is left out where `is_drawn`, float32, is 0.

    `kth` is in the dtype of scores, `may_drop` float64, `temperatures` and `lowest` float32, `top_k` and
    `streams` int64 (noise.py: stream_key), all [R, 1] or [R]. `positions` int64 [R] are those of the output.
    """
    from engine.cuda.draw_kernel import launch

    tokens = torch.empty(len(scores), dtype=torch.int64, device=scores.device)
    is_valid = torch.empty(len(scores), dtype=torch.bool, device=scores.device)
    if scores.stride(1) != 1:
        scores = scores.contiguous()
    launch(
        scores, temperatures, kth, top_k, may_drop, lowest, is_drawn, streams, positions, tokens, is_valid
    )  # fmt: skip
    return tokens, is_valid


@draw.register_fake
def _shapes(scores: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor]:
    rows = len(scores)
    return scores.new_empty(rows, dtype=torch.int64), scores.new_empty(rows, dtype=torch.bool)


@draw.register_kernel("cpu")
def _reference(
    scores: torch.Tensor,
    temperatures: torch.Tensor,
    kth: torch.Tensor | None,
    top_k: torch.Tensor | None,
    may_drop: torch.Tensor | None,
    lowest: torch.Tensor | None,
    is_drawn: torch.Tensor,
    streams: torch.Tensor,
    positions: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """By its definition."""
    relative = scores.float()
    best = relative.amax(-1, keepdim=True)  # a NaN is the maximum
    relative = (relative - best) / temperatures.view(-1, 1)
    if kth is not None and top_k is not None:
        least = (kth.float().view(-1, 1) - best) / temperatures.view(-1, 1)
        relative = relative.masked_fill((relative < least) & (top_k.view(-1, 1) > 0), -torch.inf)
    if may_drop is not None:
        ordered, order = relative.sort(dim=-1, stable=True)
        below = ordered.exp().double().cumsum(-1)
        dropped = below <= may_drop.view(-1, 1) * below[:, -1:]
        dropped[:, -1] = False
        relative = relative.masked_fill(torch.empty_like(dropped).scatter_(1, order, dropped), -torch.inf)
    if lowest is not None:
        relative = relative.masked_fill(relative < lowest.view(-1, 1), -torch.inf)
    noise = gumbel(noise_keys(streams.view(-1), positions), torch.arange(relative.shape[1]))
    tokens = (relative + noise * is_drawn.view(-1, 1)).argmax(-1)
    return tokens, best.isfinite()[:, 0]
