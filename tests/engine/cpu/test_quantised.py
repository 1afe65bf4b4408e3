"""The C++ ops over quantised pools: conversions bit for bit those of kvcache.quant; attention over what is
stored."""

from __future__ import annotations

import ctypes
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.batch import ForwardBatch
from engine.cpu.attention import CpuAttention
from engine.cpu.mla import CpuLatentAttention
from engine.cpu.op import kernels, set_isa
from kvcache.layout import KVGroupSpec, LatentGroupSpec
from kvcache.pool import MHAKVCache, MLAKVCache
from kvcache.quant import KVFormat
from tests.support.cpu_kernels import kernel_isas
from tests.support.pool_rows import read_kv

ISAS = kernel_isas()

FORMATS = [form for form in KVFormat if form is not KVFormat.AUTO]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def seeded():
    torch.manual_seed(0)


@pytest.fixture(params=ISAS)
def isa(request):
    set_isa(request.param)
    yield request.param
    set_isa(ISAS[-1])


def batch_of(q_lens, seq_lens, page_size, seed=0):
    """Sequences on shuffled pages."""
    counts = [-(-n // page_size) for n in seq_lens]
    order = np.random.default_rng(seed).permutation(sum(counts)) + 1
    table = np.zeros((len(seq_lens), max(counts)), dtype=np.int32)
    for s, count in enumerate(counts):
        table[s, :count], order = order[:count], order[count:]
    positions = np.concatenate([np.arange(n - q, n) for q, n in zip(q_lens, seq_lens, strict=True)])
    owners = np.repeat(np.arange(len(q_lens)), q_lens)
    return ForwardBatch(
        input_ids=np.zeros(len(positions), np.int64),
        positions=positions.astype(np.int64),
        out_slots=table[owners, positions // page_size].astype(np.int64) * page_size + positions % page_size,
        rows=np.arange(1, len(q_lens) + 1, dtype=np.int32),
        q_lens=np.array(q_lens, np.int32),
        seq_lens=np.array(seq_lens, np.int32),
        page_table=table,
        sampled=np.zeros(0, np.int32),
        sampling=[],
    )


def hard_values(count, dim, dtype):
    """Floats of every kind: random bits, every number of both fp8 formats, ties, overflow, NaN."""
    bits = torch.randint(-(1 << 31), 1 << 31, (count, dim)).to(torch.int32)
    random = bits.view(torch.float32)
    random = random.where(torch.rand(count, dim) < 0.5, torch.randn(count, dim))
    codes = torch.arange(256, dtype=torch.uint8)
    every = [codes.view(d).float() for d in (torch.float8_e4m3fn, torch.float8_e5m2)]
    steps = torch.cat([torch.arange(-600, 600) / 2**n for n in (-7, 0, 4, 11, 18)])
    special = torch.tensor([math.nan, -math.nan, math.inf, -math.inf, 0.0, -0.0, 464.0, 1e-45, 61440.0])
    chosen = torch.cat((*every, steps, special))
    chosen = torch.nn.functional.pad(chosen, (0, -len(chosen) % dim)).view(-1, dim)
    return torch.cat((chosen, random)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16"])
@pytest.mark.parametrize("form", FORMATS)
def test_what_is_written_and_read_is_that_of_the_torch_formats(form, dtype, isa):
    """Sequences of one token each: attention gives back V itself, so every stored code is seen as a value."""
    values = hard_values(40, 48, dtype)
    count = len(values)
    spec = KVGroupSpec((0, 4), 1, 48, dtype, stored=form)
    pool, want = MHAKVCache(spec, count, 16), MHAKVCache(spec, count, 16)
    batch = batch_of([1] * count, [1] * count, 16)
    keys = torch.ones(count, 1, 48, dtype=dtype)
    backend = CpuAttention(pool, 2, 0.1)
    backend.prepare(batch)
    out = torch.empty(count, 2, 48, dtype=dtype)
    backend.forward(1, torch.ones(count, 2, 48, dtype=dtype), keys, values[:, None], out)
    slots = torch.from_numpy(batch.out_slots)
    want.set_kv_buffer(4, slots, keys, values[:, None])
    assert torch.equal(pool.bytes, want.bytes)
    read = read_kv(want, 4, slots)[1].expand(-1, 2, -1)
    torch.testing.assert_close(out, read, rtol=0, atol=0, equal_nan=True)


SHAPES = {
    "decode": {"q_lens": [1, 1, 1], "seq_lens": [1, 17, 200]},
    "mixed": {"q_lens": [1, 20, 1, 3], "seq_lens": [70, 20, 1, 66]},
    "split_context": {"q_lens": [1, 1], "seq_lens": [700, 257]},
    "one_token_pages": {"q_lens": [1, 9], "seq_lens": [70, 30], "page_size": 1},
    "large_pages": {"q_lens": [1, 9], "seq_lens": [130, 65], "page_size": 64},
    "wide_head": {"q_lens": [1, 9], "seq_lens": [90, 70], "head_dim": 512},
    "odd_head": {"q_lens": [1, 9], "seq_lens": [90, 70], "head_dim": 48},
    "wide_group": {"q_lens": [1, 30], "seq_lens": [90, 70], "heads": 14},
    "wider_than_an_item": {"q_lens": [9, 1], "seq_lens": [40, 20], "heads": 300, "kv_heads": 1},
    "long_prefill": {"q_lens": [150, 1], "seq_lens": [1310, 20], "heads": 6, "head_dim": 64},
    "window": {"q_lens": [1, 1, 40, 100], "seq_lens": [700, 40, 65, 900], "window": 33, "head_dim": 64},
    "window_of_two_tiles": {"q_lens": [40], "seq_lens": [1300], "window": 600},
}


@pytest.mark.covering
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16"])
@pytest.mark.parametrize("form", FORMATS)
def test_attention_is_that_over_a_plain_pool_of_the_same_values(form, dtype, name, isa):
    """The current chunk included. Not bit for bit: a plain pool of many new tokens is packed as a whole."""
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 32, "page_size": 16, "window": None, **SHAPES[name]}
    batch = batch_of(shape["q_lens"], shape["seq_lens"], shape["page_size"])
    spec = KVGroupSpec(
        (3, 5), shape["kv_heads"], shape["head_dim"], dtype, window=shape["window"], stored=form
    )
    pages = int(batch.page_table.max())
    pool = MHAKVCache(spec, pages, shape["page_size"])
    plain = MHAKVCache(replace(spec, stored=KVFormat.AUTO), pages, shape["page_size"])
    everywhere = torch.arange(shape["page_size"], (pages + 1) * shape["page_size"])
    context = torch.randn(2, len(everywhere), shape["kv_heads"], shape["head_dim"]).to(dtype)
    pool.set_kv_buffer(5, everywhere, *context)
    plain.set_kv_buffer(5, everywhere, *read_kv(pool, 5, everywhere))
    tokens = len(batch.out_slots)
    q = torch.randn(shape["heads"], tokens, shape["head_dim"]).to(dtype).transpose(0, 1)
    k, v = torch.randn(2, tokens, shape["kv_heads"], shape["head_dim"]).to(dtype)
    out = attend(pool, batch, q, k, v)
    written = read_kv(pool, 5, torch.from_numpy(batch.out_slots))
    want = attend(plain, batch, q, *written)
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(out, want, rtol=tolerance, atol=tolerance)


def attend(pool, batch, q, k, v):
    """Of the group's second layer."""
    backend = CpuAttention(pool, q.shape[1], 0.2)
    backend.prepare(batch)
    out = torch.empty(q.shape, dtype=q.dtype)
    backend.forward(1, q, k, v, out)
    return out


@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16"])
@pytest.mark.parametrize("form", FORMATS)
def test_a_decode_row_does_not_depend_on_its_batch_or_on_threads(form, dtype):
    spec = KVGroupSpec((3, 5), 2, 64, dtype, stored=form)
    batch = batch_of([1, 1, 12], [600, 40, 300], 16)
    pool = MHAKVCache(spec, int(batch.page_table.max()), 16)
    everywhere = torch.arange(16, (pool.num_pages + 1) * 16)
    pool.set_kv_buffer(5, everywhere, *torch.randn(2, len(everywhere), 2, 64).to(dtype))
    q, (k, v) = torch.randn(14, 4, 64).to(dtype), torch.randn(2, 14, 2, 64).to(dtype)
    before = torch.get_num_threads()
    outs = []
    for threads in (1, 3):
        torch.set_num_threads(threads)
        try:
            outs.append(attend(pool, batch, q, k, v))
        finally:
            torch.set_num_threads(before)
    assert torch.equal(outs[0], outs[1])
    alone = replace(
        batch, out_slots=batch.out_slots[:1], q_lens=batch.q_lens[:1], seq_lens=batch.seq_lens[:1],
        page_table=batch.page_table[:1],
    )  # fmt: skip
    assert torch.equal(attend(pool, alone, q[:1], k[:1], v[:1]), outs[0][:1])


@pytest.mark.parametrize("dtype", DTYPES, ids=["f32", "bf16"])
@pytest.mark.parametrize("form", FORMATS)
def test_latent_rows_are_written_and_attended_as_the_torch_formats_say(form, dtype, isa):
    batch = batch_of([1, 9, 1], [70, 30, 300], 16)
    spec = LatentGroupSpec((2, 6), 48, 16, dtype, stored=form)
    pages, tokens = int(batch.page_table.max()), len(batch.out_slots)
    pool, same = MLAKVCache(spec, pages, 16), MLAKVCache(spec, pages, 16)
    plain = MLAKVCache(replace(spec, stored=KVFormat.AUTO), pages, 16)
    everywhere = torch.arange(16, (pages + 1) * 16)
    context = torch.randn(len(everywhere), 64).to(dtype)
    for each in (pool, same):
        each.set_mla_kv_buffer(6, everywhere, context[:, :48], context[:, 48:])
    rows = torch.randn(tokens, 64).to(dtype)
    q = torch.randn(tokens, 5, 64).to(dtype)
    out, slots = attend_latents(pool, batch, q, rows), torch.from_numpy(batch.out_slots)
    same.set_mla_kv_buffer(6, slots, rows[:, :48], rows[:, 48:])
    assert torch.equal(pool.bytes, same.bytes)
    stored = pool.get_rows(6, everywhere)
    plain.set_mla_kv_buffer(6, everywhere, stored[:, :48], stored[:, 48:])
    want = attend_latents(plain, batch, q, pool.get_rows(6, slots))
    assert torch.equal(out, want)


def attend_latents(pool, batch, q, rows):
    """Of the group's second layer."""
    backend = CpuLatentAttention(pool, q.shape[1], 0.2)
    backend.prepare(batch)
    out = torch.empty(*q.shape[:2], 48, dtype=q.dtype)
    backend.forward(1, q[..., :48].contiguous(), q[..., 48:].contiguous(), rows[:, :48], rows[:, 48:], out)
    return out


@pytest.mark.parametrize("form", KVFormat)
def test_the_memory_for_a_prompt_does_not_grow_with_its_context(form, isa):
    """What the op allocates to attend with a chunk."""
    measure = kernels().baton_attention_scratch_bytes
    measure.restype, measure.argtypes = ctypes.c_int64, [ctypes.c_void_p]
    sizes = []
    for context in (128, 4096):
        pool = MHAKVCache(KVGroupSpec((0,), 2, 64, torch.bfloat16, stored=form), 256, 16)
        backend = CpuAttention(pool, 4, 0.2)
        backend.prepare(batch_of([64], [context], 16))
        sizes.append(measure(ctypes.byref(backend.call)))
    assert sizes[0] == sizes[1] > 0
