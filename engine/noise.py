"""Sampling noise as a pure function of (seed, choice, position, token id).

There is no generator state, so a position gets the same noise in any batch, on any worker and after any
restart. The noise is a counter-based hash in 32-bit arithmetic: two rounds of a multiply-xorshift finaliser,
with half of the key injected before each. Signed tensors wrap around like unsigned ones, so one version runs
on every device. Each token's noise is hashed by itself, so the cost grows with the number of candidates and
not with the vocabulary.
"""

from __future__ import annotations

import torch

_MASK64 = (1 << 64) - 1


def _signed(value: int, bits: int = 32) -> int:
    """The signed integer with the same bits as an unsigned one."""
    value &= (1 << bits) - 1
    return value - (1 << bits) if value >= 1 << (bits - 1) else value


_GOLDEN, _FIRST, _SECOND = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB  # splitmix64


def _splitmix(value: int) -> int:
    value = (value + _GOLDEN) & _MASK64
    value = ((value ^ (value >> 30)) * _FIRST) & _MASK64
    value = ((value ^ (value >> 27)) * _SECOND) & _MASK64
    return value ^ (value >> 31)


def stream_key(seed: int, choice: int) -> int:
    """The key of one choice's stream, an int64. Any Python int is a valid seed."""
    return _signed(_splitmix(_splitmix(seed & _MASK64) ^ (choice & _MASK64)), 64)


def noise_keys(streams: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """int64 [n]: the keys of one output position of each stream (int64 [n] both): splitmix64 in tensors."""
    keys = (streams ^ positions).add_(_signed(_GOLDEN, 64))
    _xor_shift(keys, 30)
    keys *= _signed(_FIRST, 64)
    _xor_shift(keys, 27)
    keys *= _signed(_SECOND, 64)
    _xor_shift(keys, 31)
    return keys


_MULTIPLIERS = (_signed(0x7FEB352D), _signed(0x846CA68B))


def _xor_shift(bits: torch.Tensor, shift: int) -> None:
    # >> of a signed integer copies the sign bit; the mask makes it the logical shift
    width = bits.element_size() * 8
    bits ^= (bits >> shift).bitwise_and_((1 << (width - shift)) - 1)


def _mix(bits: torch.Tensor) -> None:
    _xor_shift(bits, 16)
    bits *= _MULTIPLIERS[0]
    _xor_shift(bits, 15)
    bits *= _MULTIPLIERS[1]
    _xor_shift(bits, 16)


def hash_bits(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """int32 [n, c] of uniformly distributed bits for `keys` int64 [n] and `token_ids` (any integer, [c])."""
    halves = keys.contiguous().view(torch.int32).view(-1, 2)  # [n, 2]: the low half comes first
    bits = halves[:, :1] ^ token_ids.to(torch.int32)
    _mix(bits)
    bits ^= halves[:, 1:]
    _mix(bits)
    return bits


def gumbel(keys: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
    """float32 [n, c] standard Gumbel noise: argmax(logits + noise) is a draw from softmax(logits)."""
    # (unsigned bits + 1/2) / 2^32 is in (0, 1). The largest noise comes from the numbers near 0, which
    # float32 holds exactly. Adding 2^31 to signed bits was rejected: the lowest were rounded before.
    uniform = hash_bits(keys, token_ids).to(torch.float32).add_(0.5).mul_(2.0**-32)
    uniform.add_(uniform < 0)
    uniform.clamp_(max=1 - 2.0**-24)  # the noise is finite where the sum is rounded to 1
    return uniform.neg_().log1p_().neg_().log_().neg_()
