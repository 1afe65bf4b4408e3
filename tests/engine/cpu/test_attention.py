"""The C++ paged attention op against plain torch, for each instruction set this CPU has."""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.batch import ForwardBatch
from engine.cpu.attention import CpuAttention, check_supported
from engine.cpu.op import KernelsUnavailable, set_isa
from kvcache.quant import KVFormat
from tests.support.cpu_kernels import kernel_isas

ISAS = kernel_isas()


@pytest.fixture(params=ISAS)
def isa(request):
    set_isa(request.param)
    yield request.param
    set_isa(ISAS[-1])


def spec(dtype=torch.float32, head_dim=32, **changes):
    fields = {
        "dtype": dtype, "head_dim": head_dim, "v_head_dim": None, "tile_order": "plain", "window": None,
        "stored": KVFormat.AUTO,
    }  # fmt: skip
    return SimpleNamespace(**{**fields, **changes})


@dataclass
class Case:
    """A pool with random contexts and a batch of new tokens for them."""

    pool: SimpleNamespace
    batch: ForwardBatch
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sinks: torch.Tensor | None = None
    softcap: float | None = None


def make_case(
    q_lens, seq_lens, heads=4, kv_heads=2, head_dim=32, page_size=16, dtype=torch.float32, seed=0,
    window=None, sinks=False, softcap=None,
):  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    numbers = np.random.default_rng(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator).to(dtype)

    counts = [-(-n // page_size) for n in seq_lens]
    order = numbers.permutation(sum(counts)) + 1
    table = np.zeros((len(seq_lens), max(counts)), dtype=np.int32)
    for s, count in enumerate(counts):
        table[s, :count], order = order[:count], order[count:]
    positions = np.concatenate([np.arange(n - q, n) for q, n in zip(q_lens, seq_lens, strict=True)])
    owners = np.repeat(np.arange(len(q_lens)), q_lens)
    slots = table[owners, positions // page_size].astype(np.int64) * page_size + positions % page_size
    tokens = len(positions)
    batch = ForwardBatch(
        input_ids=np.zeros(tokens, np.int64),
        positions=positions.astype(np.int64),
        out_slots=slots,
        rows=np.arange(1, len(q_lens) + 1, dtype=np.int32),
        q_lens=np.array(q_lens, np.int32),
        seq_lens=np.array(seq_lens, np.int32),
        page_table=table,
        sampled=np.zeros(0, np.int32),
        sampling=[],
    )
    pool = SimpleNamespace(
        spec=spec(dtype, head_dim, window=window),
        data=normal(sum(counts) + 2, 2, 2, kv_heads, page_size, head_dim),
    )
    if window is not None:  # what no query sees may be given away: its page id is of a page that poisons
        pool.data[-1] = math.nan
        for s, (new, length) in enumerate(zip(q_lens, seq_lens, strict=True)):
            table[s, : max(0, length - new - window + 1) // page_size] = len(pool.data) - 1
    # As transformers leaves them: heads outside tokens.
    q, k, v = (normal(n, tokens, head_dim).transpose(0, 1) for n in (heads, kv_heads, kv_heads))
    return Case(pool, batch, q, k, v, normal(heads) * 4 if sinks else None, softcap)


def expected(case, layer, scale):
    """Attention by definition, in float64, from the pool as it must be after the write."""
    pool = case.pool.data.clone()
    page_size = pool.shape[4]
    page, offset = case.batch.out_slots // page_size, case.batch.out_slots % page_size
    pool[page, layer, 0, :, offset] = case.k
    pool[page, layer, 1, :, offset] = case.v
    outs = []
    starts = case.batch.starts()
    group = case.q.shape[1] // case.k.shape[1]
    for s, length in enumerate(case.batch.seq_lens):
        at = np.arange(length)
        pages = case.batch.page_table[s, at // page_size]
        k, v = (pool[pages, layer, i, :, at % page_size].double() for i in (0, 1))  # [length, kv_heads, dim]
        k, v = (x.repeat_interleave(group, 1).nan_to_num() for x in (k, v))
        q = case.q[starts[s] : starts[s + 1]].double()
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        if case.softcap is not None:
            scores = (scores / case.softcap).tanh() * case.softcap
        behind = torch.arange(length - len(q), length)[:, None] - torch.arange(length)[None]
        seen = (behind >= 0) & (behind < (case.pool.spec.window or length))
        scores = scores.masked_fill(~seen, -math.inf)
        if case.sinks is not None:
            column = case.sinks.double()[:, None, None].expand(-1, len(q), 1)
            scores = torch.cat((scores, column), dim=-1)
        weights = scores.softmax(-1)[..., :length]
        outs.append(torch.einsum("hqk,khd->qhd", weights, v))
    return torch.cat(outs), pool


def run(case, layer=1, scale=0.2):
    backend = CpuAttention(case.pool, case.q.shape[1], scale, case.softcap)
    backend.prepare(case.batch)
    out = torch.empty(case.q.shape, dtype=case.q.dtype)
    backend.forward(layer, case.q, case.k, case.v, out, case.sinks)
    return out


SHAPES = {
    "decode": {"q_lens": [1, 1, 1], "seq_lens": [1, 17, 200]},
    "prefill": {"q_lens": [40], "seq_lens": [40]},
    "chunk_after_prefix": {"q_lens": [33], "seq_lens": [100]},
    "mixed": {"q_lens": [1, 20, 1, 3], "seq_lens": [70, 20, 1, 66]},
    "split_context": {"q_lens": [1, 1], "seq_lens": [700, 257]},
    "one_token_pages": {"q_lens": [1, 9], "seq_lens": [70, 30], "page_size": 1},
    "large_pages": {"q_lens": [1, 9], "seq_lens": [130, 65], "page_size": 64},
    "wide_head": {"q_lens": [1, 7], "seq_lens": [90, 70], "head_dim": 256},
    "widest_head": {"q_lens": [1, 20], "seq_lens": [300, 70], "head_dim": 512},
    "narrow_odd_head": {"q_lens": [1, 7], "seq_lens": [90, 70], "head_dim": 48},
    "eight_of_128": {"q_lens": [1, 3, 1], "seq_lens": [301, 77, 1], "heads": 16, "head_dim": 128},
    "seven_of_64": {"q_lens": [1, 2, 1], "seq_lens": [63, 129, 2], "heads": 14, "head_dim": 64},
    "no_grouping": {"q_lens": [1, 30], "seq_lens": [90, 70], "heads": 3, "kv_heads": 3},
    "wide_group": {"q_lens": [1, 30], "seq_lens": [90, 70], "heads": 14, "kv_heads": 2},
    "long_prefill": {"q_lens": [150, 1], "seq_lens": [310, 20], "heads": 6, "head_dim": 64},
}


# Windows whose first key is the last of a page, the first of the next, and one more; around the tiles of 64
# and 512 keys and the 256 of a split row; as wide as the context and wider.
WINDOWED = {
    "decode_at_page_borders": {"q_lens": [1] * 4, "seq_lens": [46, 47, 48, 49], "window": 16},
    "decode_within_a_page": {"q_lens": [1, 1, 1], "seq_lens": [5, 6, 200], "window": 5},
    "one_key": {"q_lens": [1, 20], "seq_lens": [33, 50], "window": 1},
    "as_wide_as_the_context": {"q_lens": [1, 1, 40], "seq_lens": [63, 64, 65], "window": 64},
    "chunk_past_the_window": {"q_lens": [100], "seq_lens": [100], "window": 17},
    "chunk_after_prefix": {"q_lens": [33, 3], "seq_lens": [100, 90], "window": 20},
    "split_rows": {"q_lens": [1, 1, 1], "seq_lens": [700, 600, 257], "window": 300},
    "window_of_a_split": {"q_lens": [1, 1], "seq_lens": [700, 900], "window": 256},
    "one_past_a_split": {"q_lens": [1, 1], "seq_lens": [700, 900], "window": 257},
    "one_token_pages": {"q_lens": [1, 9], "seq_lens": [70, 30], "window": 10, "page_size": 1},
    "large_pages": {"q_lens": [1, 9, 70], "seq_lens": [130, 65, 140], "window": 33, "page_size": 64},
    "long_chunk": {"q_lens": [600, 1], "seq_lens": [900, 20], "window": 128, "head_dim": 64},
    "over_two_tiles": {"q_lens": [40], "seq_lens": [1300], "window": 600, "head_dim": 64, "heads": 6},
    "wide_group": {"q_lens": [1, 30], "seq_lens": [90, 70], "window": 31, "heads": 14, "kv_heads": 2},
    "wide_head": {"q_lens": [1, 9], "seq_lens": [90, 70], "window": 13, "head_dim": 256},
}
SINKS = {
    **{f"window_{name}": WINDOWED[name] for name in ("split_rows", "long_chunk", "one_key")},
    **{name: SHAPES[name] for name in ("mixed", "split_context", "wide_head")},
}
CAPPED = {
    **{f"window_{name}": WINDOWED[name] for name in ("split_rows", "long_chunk", "chunk_past_the_window")},
    **{name: SHAPES[name] for name in ("mixed", "split_context", "wide_head", "long_prefill")},
}
CASES = {
    **SHAPES,
    **{f"window_{name}": shape for name, shape in WINDOWED.items()},
    **{f"{name}+sinks": {**shape, "sinks": True} for name, shape in SINKS.items()},
    **{f"{name}+softcap": {**shape, "softcap": 1.5} for name, shape in CAPPED.items()},
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
def test_equals_attention_by_definition(name, dtype, isa):
    case = make_case(**CASES[name], dtype=dtype)
    want, pool_after = expected(case, 1, 0.2)
    got = run(case)
    tolerance = 2e-5 if dtype == torch.float32 else 2e-2
    torch.testing.assert_close(case.pool.data, pool_after, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(got.double(), want, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.parametrize("window", [None, 290])
def test_a_decode_row_does_not_depend_on_its_batch_or_on_threads(dtype, window):
    together = make_case([1, 1, 1], [600, 40, 300], dtype=dtype, window=window, sinks=window is not None)
    outs = {}
    before = torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            outs[threads] = run(together)
        finally:
            torch.set_num_threads(before)
    assert torch.equal(outs[1], outs[2])
    assert torch.equal(outs[1], outs[5])
    batch = together.batch
    alone = ForwardBatch(
        batch.input_ids[:1], batch.positions[:1], batch.out_slots[:1], batch.rows[:1], batch.q_lens[:1],
        batch.seq_lens[:1], batch.page_table[:1], batch.sampled, [],
    )  # fmt: skip
    single = Case(together.pool, alone, together.q[:1], together.k[:1], together.v[:1], together.sinks)
    assert torch.equal(run(single)[0], outs[1][0])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"dtype": torch.float16}, "float16"),
        ({"head_dim": 24}, "24"),
        ({"head_dim": 528}, "528"),
        ({"v_head_dim": 64}, "64"),
        ({"tile_order": "dot_pairs"}, "dot_pairs"),
    ],
)
def test_what_the_op_cannot_serve_is_named(change, said):
    with pytest.raises(KernelsUnavailable, match=said):
        check_supported(spec(**change))
