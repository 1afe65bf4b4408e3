"""The noise: exact bits, pure, uniform, and finite."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.noise import gumbel, hash_bits, noise_keys, stream_key
from tests.support.row_sampler import noise_key


def key_of(seed: int, choice: int, position: int) -> torch.Tensor:
    return noise_keys(torch.tensor([stream_key(seed, choice)]), torch.tensor([position]))


def noise(seed: int, choice: int, position: int, ids: torch.Tensor) -> torch.Tensor:
    return gumbel(key_of(seed, choice, position), ids)[0]


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
    signed = torch.from_numpy(np.array([key], dtype=np.uint64).view(np.int64))
    bits = hash_bits(signed, torch.from_numpy(ids))[0]
    assert (bits.numpy().view(np.uint32) == reference_bits(key, ids)).all()


@given(seed=st.integers(-(2**70), 2**70), choice=st.integers(0, 1000), position=st.integers(0, 10**6))
def test_keys_equal_unsigned_arithmetic(seed: int, choice: int, position: int) -> None:
    assert int(key_of(seed, choice, position)) % 2**64 == noise_key(seed, choice, position)


@given(seed=st.integers(-(2**70), 2**70), choice=st.integers(0, 1000), position=st.integers(0, 10**6))
def test_noise_of_a_token_does_not_depend_on_the_others(seed: int, choice: int, position: int) -> None:
    every = noise(seed, choice, position, torch.arange(300))
    some = torch.tensor([299, 3, 77])
    assert torch.equal(noise(seed, choice, position, some), every[some])


def test_keys_of_neighbouring_seeds_choices_and_positions_differ() -> None:
    keys = {int(key_of(s, c, p)) for s in range(20) for c in range(20) for p in range(20)}
    assert len(keys) == 8000


def test_gumbel_has_its_mean_and_deviation_and_is_finite() -> None:
    drawn = torch.cat([noise(s, 0, 0, torch.arange(200_000)) for s in range(5)]).double()
    assert drawn.isfinite().all()
    assert abs(float(drawn.mean()) - np.euler_gamma) < 5e-3
    assert abs(float(drawn.std()) - np.pi / 6**0.5) < 5e-3
    assert float(drawn.max()) > 12  # a float32 uniform near 1 would cut the tail off


def test_the_largest_noise_has_its_own_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """A token 20 below the best of 150,000 is drawn once in many thousand steps, not more often."""
    lowest = torch.arange(2000, dtype=torch.int32)[None]
    monkeypatch.setattr("engine.noise.hash_bits", lambda _keys, _ids: lowest)
    exact = -np.log(-np.log1p(-(np.arange(2000) + 0.5) / 2.0**32))
    assert noise(0, 0, 0, lowest[0]).double().numpy() == pytest.approx(exact, abs=1e-5)


def test_noise_of_the_extreme_bits_is_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = torch.tensor([[-(2**31), 2**31 - 1]], dtype=torch.int32)
    monkeypatch.setattr("engine.noise.hash_bits", lambda _keys, _ids: extremes)
    assert noise(0, 0, 0, torch.arange(2)).isfinite().all()


def test_neighbouring_tokens_and_positions_are_uncorrelated() -> None:
    ids = torch.arange(100_000)
    here, next_position = noise(1, 0, 5, ids), noise(1, 0, 6, ids)
    for a, b in ((here, next_position), (here[1:], here[:-1])):
        assert abs(float(torch.corrcoef(torch.stack([a, b]))[0, 1])) < 0.015
