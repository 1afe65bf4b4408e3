"""The C++ latent attention op against plain torch, for each instruction set this CPU has."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from engine.backends import query_blocks
from engine.backends.latent_reference import TorchLatentAttention
from engine.batch import ForwardBatch
from engine.cpu.mla import MAX_RANK, CpuLatentAttention, check_supported
from engine.cpu.op import KernelsUnavailable, set_isa
from engine.paged_layers import LatentBackend
from kvcache.layout import LatentGroupSpec
from kvcache.pool import MLAKVCache
from tests.support.cpu_kernels import kernel_isas
from tests.support.largest_tensor import LargestTensor

ISAS = kernel_isas()

LAYERS, PLACE, SCALE = (4, 7), 1, 0.2


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    set_isa(request.param)
    yield request.param
    set_isa(ISAS[-1])


@dataclass(frozen=True)
class Case:
    """A pool with random contexts, and a batch of new tokens for them."""

    pool: MLAKVCache
    batch: ForwardBatch
    q_latent: torch.Tensor  # [T, heads, rank], heads outside tokens in memory, as a product leaves them
    q_rope: torch.Tensor  # [T, heads, rope_dim]
    latent: torch.Tensor  # [T, rank], a part of wider rows
    rope: torch.Tensor  # [T, rope_dim]

    def run(self, backend: type[Any], sinks: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """(attended [T, heads, rank], the pool's data afterwards). This case's own pool stays as it is."""
        pool = MLAKVCache(self.pool.spec, self.pool.num_pages, self.pool.page_size)
        pool.data.copy_(self.pool.data)
        attention: LatentBackend = backend(pool, self.q_latent.shape[1], SCALE)
        attention.prepare(self.batch)
        out = torch.full(self.q_latent.shape, torch.nan, dtype=self.q_latent.dtype)
        attention.forward(PLACE, self.q_latent, self.q_rope, self.latent, self.rope, out, sinks)
        return out, pool.data

    def alone(self, sequence: int) -> Case:
        """The same with one of its sequences only."""
        start, end = self.batch.starts()[sequence : sequence + 2].tolist()
        one, new = slice(sequence, sequence + 1), slice(start, end)
        batch = replace(
            self.batch,
            input_ids=self.batch.input_ids[new],
            positions=self.batch.positions[new],
            out_slots=self.batch.out_slots[new],
            rows=self.batch.rows[one],
            q_lens=self.batch.q_lens[one],
            seq_lens=self.batch.seq_lens[one],
            page_table=self.batch.page_table[one],
        )
        return Case(self.pool, batch, self.q_latent[new], self.q_rope[new], self.latent[new], self.rope[new])


def make_case(
    q_lens: list[int],
    seq_lens: list[int],
    heads: int = 4,
    rank: int = 32,
    rope_dim: int = 8,
    page_size: int = 16,
    dtype: torch.dtype = torch.float32,
) -> Case:
    generator, numbers = torch.Generator().manual_seed(0), np.random.default_rng(0)

    def normal(*shape: int) -> torch.Tensor:
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
    pool = MLAKVCache(LatentGroupSpec(LAYERS, rank, rope_dim, dtype), sum(counts), page_size)
    pool.data.copy_(normal(*pool.data.shape))
    return Case(
        pool,
        batch,
        normal(heads, tokens, rank).transpose(0, 1),
        normal(heads, tokens, rope_dim).transpose(0, 1),
        normal(tokens, rank + rope_dim)[:, :rank],
        normal(tokens, rope_dim),
    )


SHAPES: dict[str, dict[str, Any]] = {
    "decode": {"q_lens": [1, 1, 1], "seq_lens": [1, 17, 200]},
    "prefill": {"q_lens": [40], "seq_lens": [40]},
    "chunk_after_prefix": {"q_lens": [33], "seq_lens": [100]},
    "mixed": {"q_lens": [1, 20, 1, 3], "seq_lens": [70, 20, 1, 66]},
    "split_context": {"q_lens": [1, 1, 1], "seq_lens": [700, 257, 256]},
    "split_beside_chunk": {"q_lens": [1, 21, 1], "seq_lens": [513, 300, 90], "heads": 40},
    "one_token_pages": {"q_lens": [1, 9], "seq_lens": [70, 30], "page_size": 1},
    "large_pages": {"q_lens": [1, 9], "seq_lens": [130, 65], "page_size": 64},
    "one_head": {"q_lens": [1, 70], "seq_lens": [90, 75], "heads": 1},
    "heads_beyond_an_item": {"q_lens": [1, 5], "seq_lens": [300, 70], "heads": 33},
    "odd_widths": {"q_lens": [1, 7], "seq_lens": [90, 70], "heads": 3, "rank": 21, "rope_dim": 6},
    "published_widths": {"q_lens": [1, 35], "seq_lens": [310, 70], "heads": 16, "rank": 512, "rope_dim": 64},
}


@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("name", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.usefixtures("isa")
def test_equals_the_reference(name: str, dtype: torch.dtype, has_sinks: bool) -> None:
    case = make_case(**SHAPES[name], dtype=dtype)
    heads = case.q_latent.shape[1]
    sinks = torch.linspace(-3.0, 3.0, heads) if has_sinks else None
    want, pool_after = case.run(TorchLatentAttention, sinks)
    got, pool = case.run(CpuLatentAttention, sinks)
    assert torch.equal(pool, pool_after)
    assert not torch.equal(pool, case.pool.data)
    # Both take sums of the same numbers in float32; in bfloat16 they may round apart once, at the end.
    bound = {"rtol": 1e-5, "atol": 2e-5} if dtype == torch.float32 else {"rtol": 8e-3, "atol": 1e-4}
    torch.testing.assert_close(got, want, **bound)


@pytest.mark.parametrize("name", ["odd_widths", "mixed"])
def test_the_reference_equals_attention_by_definition(name: str) -> None:
    """One query and one head at a time, in float64. A sink is a score more, of no value."""
    case = make_case(**SHAPES[name])
    heads, rank = case.q_latent.shape[1:]
    sinks = torch.linspace(-1.0, 4.0, heads)
    got, pool = case.run(TorchLatentAttention, sinks)
    starts = case.batch.starts().tolist()
    for s, length in enumerate(case.batch.seq_lens.tolist()):
        context = pool[case.batch.page_table[s], PLACE].double().flatten(0, 1)[:length]
        for token in range(starts[s], starts[s + 1]):
            seen = context[: length - starts[s + 1] + token + 1]
            for head in range(heads):
                query = torch.cat((case.q_latent[token, head], case.q_rope[token, head])).double()
                scores = torch.cat((seen @ query * SCALE, sinks[head, None].double()))
                want = scores.softmax(-1)[:-1] @ seen[:, :rank]
                torch.testing.assert_close(got[token, head].double(), want, rtol=0, atol=1e-5)


def test_the_reference_holds_few_scores_of_a_chunk_with_a_long_context(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No tensor of a forward is larger than the rows that are gathered."""
    case = make_case([60], [1024], heads=20)
    want, _ = case.run(TorchLatentAttention)
    pool = MLAKVCache(case.pool.spec, case.pool.num_pages, case.pool.page_size)
    pool.data.copy_(case.pool.data)
    attention, out = TorchLatentAttention(pool, 20, SCALE), torch.empty_like(want)
    monkeypatch.setattr(query_blocks, "SCORES_AT_ONCE", 2 * 20 * 1024)
    attention.prepare(case.batch)
    with LargestTensor() as largest:
        new = case.q_latent, case.q_rope, case.latent, case.rope
        attention.forward(PLACE, *new, out)
    assert largest.values <= max(case.q_latent.numel() + case.q_rope.numel(), 1024 * 40)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["f32", "bf16"])
@pytest.mark.usefixtures("isa")
def test_a_result_does_not_depend_on_the_batch_or_on_threads(dtype: torch.dtype) -> None:
    together = make_case([1, 1, 9, 1], [600, 40, 300, 300], heads=20, dtype=dtype)
    outs = {}
    before = torch.get_num_threads()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        try:
            outs[threads], _ = together.run(CpuLatentAttention)
        finally:
            torch.set_num_threads(before)
    assert torch.equal(outs[1], outs[2])
    assert torch.equal(outs[1], outs[5])
    starts = together.batch.starts().tolist()
    for sequence in range(4):
        single, _ = together.alone(sequence).run(CpuLatentAttention)
        assert torch.equal(single, outs[1][starts[sequence] : starts[sequence + 1]]), sequence


def test_pages_of_others_and_places_past_the_context_are_not_read() -> None:
    case = make_case([1, 1, 20], [37, 300, 50])
    want, _ = case.run(CpuLatentAttention)
    own = torch.full(case.pool.data.shape, torch.nan)
    for s, length in enumerate(case.batch.seq_lens.tolist()):
        for page, first in zip(case.batch.page_table[s].tolist(), range(0, length, 16), strict=False):
            own[page, :, : length - first] = case.pool.data[page, :, : length - first]
    case.pool.data.copy_(own)
    got, _ = case.run(CpuLatentAttention)
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    ("spec", "said"),
    [
        (LatentGroupSpec((0,), 32, 8, torch.float16), "float16"),
        (LatentGroupSpec((0,), MAX_RANK + 1, 8, torch.float32), "513"),
        (LatentGroupSpec((0,), 512, 144, torch.float32), "656"),
    ],
)
def test_what_the_op_cannot_serve_is_named(spec: LatentGroupSpec, said: str) -> None:
    with pytest.raises(KernelsUnavailable, match=said):
        check_supported(spec)
