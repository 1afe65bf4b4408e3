"""Quantised formats: every code, rounding by a plain reference, bytes per token, and what a layout says."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import pytest
import torch

from common.errors import ConfigError
from kvcache.layout import GroupSpec, KVGroupSpec, LatentGroupSpec, StateGroupSpec, StateTensor, stored_as
from kvcache.pool import MHAKVCache, MLAKVCache
from kvcache.quant import BLOCK, KVFormat, QuantisedRows, from_fp4, to_fp4, to_fp8
from tests.support.pool_rows import read_kv
from wire.records import layout_digest

FP8 = (KVFormat.FP8_E4M3, KVFormat.FP8_E5M2)
QUANTISED = (*FP8, KVFormat.FP4_E2M1)
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
SHARE = {KVFormat.FP8_E4M3: (1, 2), KVFormat.FP8_E5M2: (1, 2), KVFormat.FP4_E2M1: (9, 32)}
"""Of bfloat16's bytes."""


def numbers_of(form: KVFormat) -> list[float]:
    """The finite magnitudes of an fp8 format in the order of their codes, from its definition."""
    mantissa_bits, bias, codes = (3, 7, 0x7F) if form is KVFormat.FP8_E4M3 else (2, 15, 0x7C)
    numbers = []
    for code in range(codes):
        exponent, mantissa = code >> mantissa_bits, code % (1 << mantissa_bits) / (1 << mantissa_bits)
        numbers.append(math.ldexp(mantissa + (exponent > 0), max(exponent, 1) - bias))
    return numbers


def nearest(value: float, numbers: list[float] | tuple[float, ...]) -> int:
    """The code of the number nearest to a magnitude; of two, the even code; the last is the largest."""
    return min(range(len(numbers)), key=lambda code: (abs(numbers[code] - value), code % 2))


def hard_floats(count: int) -> torch.Tensor:
    """Random float32 of every magnitude, both signs; with zeros, infinities and subnormals, without NaN."""
    generator = torch.Generator().manual_seed(1)
    bits = torch.randint(-(1 << 31), 1 << 31, (count,), generator=generator).to(torch.int32)
    near = (
        torch.randn(count, generator=generator) * torch.randint(-20, 20, (count,), generator=generator).exp2()
    )
    special = torch.tensor(
        [0.0, -0.0, math.inf, -math.inf, 1e-45, -1e-40, 3e38, 447.9, 448.0, 464.0, 57344.0]
    )
    return torch.cat((bits.view(torch.float32).nan_to_num(0.5), near, special))


@pytest.mark.parametrize("form", FP8)
def test_fp8_holds_its_numbers(form: KVFormat) -> None:
    numbers = torch.tensor(numbers_of(form))
    codes = to_fp8(numbers, form).view(torch.uint8)
    assert codes.tolist() == list(range(len(numbers)))
    rows = QuantisedRows(torch.arange(256, dtype=torch.uint8)[None], form, 1, 256)
    read = rows.read((0, 0))
    assert torch.equal(read[: len(numbers)].float(), numbers)
    assert torch.equal(read[128 : 128 + len(numbers)].float(), -numbers)


@pytest.mark.parametrize("form", FP8)
def test_fp8_rounds_to_the_nearest_and_never_overflows(form: KVFormat) -> None:
    numbers = numbers_of(form)
    borders = [(a + b) / 2 for a, b in itertools.pairwise(numbers)]
    values = torch.cat((torch.tensor(borders), hard_floats(300)))
    codes = to_fp8(values, form).view(torch.uint8).tolist()
    for value, code in zip(values.tolist(), codes, strict=True):
        assert code & 0x7F == nearest(min(abs(value), numbers[-1]), numbers), value
        assert code >> 7 == (math.copysign(1, value) < 0), value
    assert to_fp8(torch.tensor([math.nan]), form).isnan().all()


def fp4_by_definition(block: list[float]) -> tuple[list[int], int]:
    """The codes and the scale code of 16 values, one at a time."""
    e4m3 = numbers_of(KVFormat.FP8_E4M3)
    sixth = torch.tensor(max(map(abs, block))) * torch.tensor(1 / 6)  # float32, as the format says
    scale = max(1, nearest(min(float(sixth), 448.0), e4m3))
    codes = []
    for value in block:
        ratio = abs(float(torch.tensor(value) / torch.tensor(e4m3[scale])))
        codes.append(nearest(min(ratio, 6.0), E2M1) | (8 if math.copysign(1, value) < 0 else 0))
    return codes, scale


def test_fp4_equals_its_definition() -> None:
    generator = torch.Generator().manual_seed(2)
    spread = torch.randint(-12, 14, (60, 1), generator=generator).exp2()
    blocks = torch.cat(
        (torch.randn(60, BLOCK, generator=generator) * spread, hard_floats(200)[: 16 * 12].view(12, BLOCK))
    )
    halves = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0] * 2) * torch.tensor(
        [1.0] * 8 + [-1.0] * 8
    )
    blocks = torch.cat((blocks, halves[None], torch.zeros(1, BLOCK)))  # ties at scale 1, and nothing at all
    data, scales = to_fp4(blocks)
    read = from_fp4(data, scales).float()
    e4m3 = numbers_of(KVFormat.FP8_E4M3)
    for i, block in enumerate(blocks.tolist()):
        codes, scale = fp4_by_definition(block)
        assert scales[i].tolist() == [scale]
        assert [code for byte in data[i].tolist() for code in (byte & 15, byte >> 4)] == codes
        want = [(-1 if code & 8 else 1) * E2M1[code & 7] * e4m3[scale] for code in codes]
        assert read[i].tolist() == want


def test_a_nan_spoils_its_block_and_no_other() -> None:
    values = torch.randn(2, 2 * BLOCK, generator=torch.Generator().manual_seed(3))
    values[0, 5] = math.nan
    read = from_fp4(*to_fp4(values))
    assert read[0, :BLOCK].isnan().all()
    assert not read[0, BLOCK:].isnan().any()
    assert not read[1].isnan().any()


def groups(stored: KVFormat, dtype: torch.dtype = torch.bfloat16) -> list[GroupSpec]:
    return [
        KVGroupSpec((0, 3), 4, 32, dtype, stored=stored),
        KVGroupSpec((1, 2), 2, 48, dtype, name="window", window=8, stored=stored),
        LatentGroupSpec((0, 1), 48, 16, dtype, stored=stored),
    ]


@pytest.mark.parametrize("page_size", [1, 2, 16, 64])
@pytest.mark.parametrize("form", QUANTISED)
def test_a_pool_has_the_bytes_of_its_dtype(form: KVFormat, page_size: int) -> None:
    """fp8 half and fp4 nine thirty-seconds of bfloat16, exactly, whatever the page size."""
    over, under = SHARE[form]
    for small, plain in zip(groups(form), groups(KVFormat.AUTO), strict=True):
        assert small.page_bytes(page_size) * under == plain.page_bytes(page_size) * over
        kind = MLAKVCache if isinstance(small, LatentGroupSpec) else MHAKVCache
        pools = [kind(spec, 7, page_size) for spec in (small, plain)]  # type: ignore[arg-type]
        assert pools[0].bytes.nbytes * under == pools[1].bytes.nbytes * over
        assert pools[0].data.nbytes == pools[0].bytes.nbytes


@pytest.mark.parametrize("page_size", [1, 16])
@pytest.mark.parametrize("form", QUANTISED)
def test_a_pool_reads_back_what_the_format_holds(form: KVFormat, page_size: int) -> None:
    """At every slot of a shuffled write: each row as if it were quantised alone; other rows untouched."""
    full, _, latent = groups(form)
    assert isinstance(full, KVGroupSpec)
    assert isinstance(latent, LatentGroupSpec)
    slots = torch.randperm(6 * page_size)[: 4 * page_size] + page_size
    k, v = torch.randn(2, len(slots), 4, 32).bfloat16()
    pool = MHAKVCache(full, 6, page_size)
    pool.set_kv_buffer(3, slots, k, v)
    got_k, got_v = read_kv(pool, 3, slots)
    assert torch.equal(got_k, alone(k, form))
    assert torch.equal(got_v, alone(v, form))
    assert int(pool.bytes.view(torch.uint8).reshape(7, 2, -1)[:, 0].count_nonzero()) == 0, "another layer"
    pages = pool.read_pages(1, slots // page_size)  # [tokens, K or V, head, offset, head_dim]
    assert torch.equal(pages[torch.arange(len(slots)), 1, :, slots % page_size], got_v)
    rows = torch.randn(len(slots), 64).bfloat16()
    latents = MLAKVCache(latent, 6, page_size)
    latents.set_mla_kv_buffer(1, slots, rows[:, :48], rows[:, 48:])
    assert torch.equal(latents.get_rows(1, slots), alone(rows, form))


def alone(values: torch.Tensor, form: KVFormat) -> torch.Tensor:
    """Rounded to what the format holds."""
    if form is KVFormat.FP4_E2M1:
        return from_fp4(*to_fp4(values))
    return to_fp8(values, form).bfloat16()


def test_the_layout_names_format_and_scales() -> None:
    digests = {layout_digest(tuple(spec.to_layout(16) for spec in groups(form))) for form in KVFormat}
    assert len(digests) == len(KVFormat), "two workers could take each other's pages for their own"
    names = [groups(form)[0].to_layout(16).dtype for form in KVFormat]
    assert names == ["bfloat16", "fp8_e4m3:scale=1", "fp8_e5m2:scale=1", "fp4_e2m1:block=16:scale=e4m3"]
    assert groups(KVFormat.FP8_E4M3)[2].to_layout(16).dtype == "fp8_e4m3:scale=1"


def test_states_stay_as_they_are() -> None:
    state = StateGroupSpec((StateTensor(0, "conv", (4,), torch.float32),))
    full = groups(KVFormat.AUTO)[0]
    assert isinstance(full, KVGroupSpec)
    assert stored_as((full, state), KVFormat.FP4_E2M1) == (replace(full, stored=KVFormat.FP4_E2M1), state)


def test_what_cannot_be_stored_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match=r"blocks of 16 values.*24.*use fp8_e4m3"):
        KVGroupSpec((0,), 2, 24, torch.bfloat16, stored=KVFormat.FP4_E2M1)
    with pytest.raises(ConfigError, match="40"):
        LatentGroupSpec((0,), 32, 8, torch.bfloat16, stored=KVFormat.FP4_E2M1)
    assert KVGroupSpec((0,), 2, 24, torch.bfloat16, stored=KVFormat.FP8_E5M2).page_bytes(1) == 96
