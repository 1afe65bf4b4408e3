"""The noise: exact bits, pure, uniform, and finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.noise import gumbel, hash_bits, noise_key


def reference_bits(key: int, ids: np.ndarray) -> np.ndarray:
    """The hash as unsigned 32-bit arithmetic spells it."""
    bits = ids.astype(np.uint32)
    for half in (key & 0xFFFFFFFF, key >> 32):
        bits ^= np.uint32(half)
        bits ^= bits >> np.uint32(16)
        bits *= np.uint32(0x7FEB352D)
        bits ^= bits >> np.uint32(15)
        bits *= np.uint32(0x846CA68B)
        bits ^= bits >> np.uint32(16)
    return bits


@given(key=st.integers(0, 2**64 - 1))
def test_bits_equal_unsigned_arithmetic(key: int) -> None:
    ids = np.arange(500)
    assert (hash_bits(key, torch.from_numpy(ids)).numpy().view(np.uint32) == reference_bits(key, ids)).all()


@given(seed=st.integers(-(2**70), 2**70), choice=st.integers(0, 1000), position=st.integers(0, 10**6))
def test_noise_of_a_token_does_not_depend_on_the_others(seed: int, choice: int, position: int) -> None:
    key = noise_key(seed, choice, position)
    every = gumbel(key, torch.arange(300))
    some = torch.tensor([299, 3, 77])
    assert torch.equal(gumbel(key, some), every[some])


def test_keys_of_neighbouring_seeds_choices_and_positions_differ() -> None:
    keys = {noise_key(s, c, p) for s in range(20) for c in range(20) for p in range(20)}
    assert len(keys) == 8000


def test_gumbel_has_its_mean_and_deviation_and_is_finite() -> None:
    noise = torch.cat([gumbel(noise_key(s, 0, 0), torch.arange(200_000)) for s in range(5)]).double()
    assert noise.isfinite().all()
    assert abs(float(noise.mean()) - np.euler_gamma) < 5e-3
    assert abs(float(noise.std()) - np.pi / 6**0.5) < 5e-3
    assert float(noise.max()) > 12  # a float32 uniform near 1 would cut the tail off


def test_noise_of_the_extreme_bits_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = torch.tensor([-(2**31), 2**31 - 1], dtype=torch.int32)
    monkeypatch.setattr("engine.noise.hash_bits", lambda _key, _ids: extremes)
    assert gumbel(0, torch.arange(2)).isfinite().all()


def test_neighbouring_tokens_and_positions_are_uncorrelated() -> None:
    ids = torch.arange(100_000)
    here, next_position = gumbel(noise_key(1, 0, 5), ids), gumbel(noise_key(1, 0, 6), ids)
    for a, b in ((here, next_position), (here[1:], here[:-1])):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.015
