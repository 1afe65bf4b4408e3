"""Sampling noise as a pure function of (seed, choice, position, token id).

There is no generator state, so a position gets the same noise in any batch, on any worker and after any
restart. The noise is a counter-based hash in 32-bit arithmetic: two rounds of a multiply-xorshift finaliser,
with half of the key injected before each. int32 tensors wrap around like unsigned ones, so one version runs
on every device. Each token's noise is hashed by itself, so the cost grows with the number of candidates and
not with the vocabulary.
"""

from __future__ import annotations

import torch

_MASK64 = (1 << 64) - 1


def _signed(value: int) -> int:
    """The int32 with the same bits as an unsigned 32-bit value."""
    value &= 0xFFFFFFFF
    return value - (1 << 32) if value >= 1 << 31 else value


def _splitmix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & _MASK64
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def noise_key(seed: int, choice: int, position: int) -> int:
    """The 64-bit key of one sampled position. Any Python int is a valid seed."""
    key = _splitmix(seed & _MASK64)
    key = _splitmix(key ^ (choice & _MASK64))
    return _splitmix(key ^ (position & _MASK64))


_MULTIPLIERS = (_signed(0x7FEB352D), _signed(0x846CA68B))


def _xor_shift(bits: torch.Tensor, shift: int) -> None:
    # >> of an int32 copies the sign bit; the mask makes it the logical shift
    bits ^= (bits >> shift) & ((1 << (32 - shift)) - 1)


def hash_bits(key: int, token_ids: torch.Tensor) -> torch.Tensor:
    """int32 [n] of uniformly distributed bits for `token_ids` (any integer dtype, [n])."""
    bits = token_ids.to(torch.int32, copy=True)
    for half in (_signed(key), _signed(key >> 32)):
        bits ^= half
        _xor_shift(bits, 16)
        bits *= _MULTIPLIERS[0]
        _xor_shift(bits, 15)
        bits *= _MULTIPLIERS[1]
        _xor_shift(bits, 16)
    return bits


def gumbel(key: int, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 [n] standard Gumbel noise: argmax(logits + noise) is a draw from softmax(logits)."""
    uniform = hash_bits(key, token_ids).to(torch.float32)
    # (bits + 2^31 + 1/2) / 2^32 is in (0, 1). float32 is precise near 0, where the largest noise comes from.
    # The clamp keeps the noise finite where the value rounds to 1.
    uniform.add_(2.0**31).add_(0.5).mul_(2.0**-32).clamp_(min=2.0**-33, max=1 - 2.0**-24)
    exponential = torch.log1p(uniform.neg_()).neg_()
    return exponential.log_().neg_()
