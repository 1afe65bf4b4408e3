"""Windows, sinks and soft-capped scores in every backend of this machine, against attention by definition."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from engine.backends import query_blocks
from engine.backends.choose import build_attention
from engine.batch import ForwardBatch
from engine.config import EngineConfig
from kvcache.layout import KVGroupSpec
from kvcache.pool import MHAKVCache
from tests.support.largest_tensor import LargestTensor
from tests.support.pool_rows import read_kv

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 16
SCALE = 0.3
LAYERS = (2, 5)


@dataclass
class Case:
    """A pool with contexts of which only what is seen is there, and a batch of new tokens for them."""

    pool: MHAKVCache
    batch: ForwardBatch
    q: torch.Tensor
    k: list[torch.Tensor]  # of each sequence, whole context: [length, KV heads, head_dim]
    v: list[torch.Tensor]


def make_case(
    q_lens: list[int], seq_lens: list[int], window: int | None, page_size: int, spoilt: float, seed: int = 0
) -> Case:
    """Contexts on shuffled pages. Whatever no query sees is `spoilt`: pages not held, their table entries 0,
    the scratch page, and the tokens of a held page before the window and after the context."""
    generator, numbers = torch.Generator().manual_seed(seed), np.random.default_rng(seed)
    pages = sum(-(-length // page_size) for length in seq_lens)
    spec = KVGroupSpec(LAYERS, KV_HEADS, HEAD_DIM, torch.float32, name="window", window=window)
    pool = MHAKVCache(spec, pages, page_size)
    pool.data.fill_(spoilt)
    ids = iter(numbers.permutation(pages) + 1)
    table = np.zeros((len(seq_lens), -(-max(seq_lens) // page_size)), dtype=np.int32)
    keys, values, slots = [], [], []
    for i, (new, length) in enumerate(zip(q_lens, seq_lens, strict=True)):
        first = 0 if window is None else max(0, length - new + 1 - window)
        for logical in range(first // page_size, -(-length // page_size)):
            table[i, logical] = next(ids)
        places = np.arange(length)
        at = table[i, places // page_size].astype(np.int64) * page_size + places % page_size
        k, v = torch.randn(2, length, KV_HEADS, HEAD_DIM, generator=generator)
        held = slice(first, length - new)
        pool.set_kv_buffer(LAYERS[1], torch.from_numpy(at[held]), k[held], v[held])
        keys.append(k)
        values.append(v)
        slots.append(at[length - new :])
    batch = ForwardBatch(
        input_ids=np.zeros(sum(q_lens), dtype=np.int64),
        positions=np.zeros(sum(q_lens), dtype=np.int64),
        out_slots=np.concatenate(slots),
        rows=np.arange(1, len(q_lens) + 1, dtype=np.int32),
        q_lens=np.asarray(q_lens, dtype=np.int32),
        seq_lens=np.asarray(seq_lens, dtype=np.int32),
        page_table=table,
        sampled=np.zeros(0, dtype=np.int32),
        sampling=[],
    )
    return Case(pool, batch, torch.randn(sum(q_lens), HEADS, HEAD_DIM, generator=generator), keys, values)


def by_definition(
    case: Case, window: int | None, sinks: torch.Tensor | None, softcap: float | None = None
) -> torch.Tensor:
    """Every query and head for itself, in float64."""
    out = []
    starts = case.batch.starts()
    for i, (new, length) in enumerate(
        zip(case.batch.q_lens.tolist(), case.batch.seq_lens.tolist(), strict=True)
    ):
        for place in range(new):
            at = length - new + place
            seen = slice(0 if window is None else max(0, at - window + 1), at + 1)
            for head in range(HEADS):
                k, v = (side[i][seen, head // (HEADS // KV_HEADS)].double() for side in (case.k, case.v))
                scores = k @ case.q[starts[i] + place, head].double() * SCALE
                weights = (scores if softcap is None else (scores / softcap).tanh() * softcap).exp()
                total = weights.sum() + (0 if sinks is None else sinks[head].double().exp())
                out.append(weights @ v / total)
    return torch.stack(out).view(-1, HEADS, HEAD_DIM).float()


@pytest.mark.parametrize("spoilt", [float("nan"), float("inf"), 3e38])
@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize(
    ("window", "page_size"), [(None, 4), (1, 4), (2, 1), (4, 4), (5, 4), (7, 16), (16, 4), (33, 8), (500, 8)]
)
@pytest.mark.parametrize("attention", ["torch", "auto"])
def test_a_query_sees_its_window_and_nothing_else(
    attention: str,
    window: int | None,
    page_size: int,
    with_sinks: bool,
    spoilt: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Decode rows, a whole prompt, chunks that end inside and on page borders, a context of one token."""
    monkeypatch.setattr(query_blocks, "SCORES_AT_ONCE", 8 * HEADS * 21)
    case = make_case([1, 1, 21, 8, 5, 1, 13], [30, 16, 21, 40, 37, 1, 64], window, page_size, spoilt)
    sinks = torch.tensor([-2.0, 0.0, 1.5, 4.0]) if with_sinks else None
    backend = build_attention(EngineConfig("m", attention=attention), case.pool, HEADS, SCALE, with_sinks)
    backend.prepare(case.batch)
    new = [
        torch.cat([side[i][-count:] for i, count in enumerate(case.batch.q_lens)])
        for side in (case.k, case.v)
    ]
    out = torch.full_like(case.q, torch.nan)
    backend.forward(1, case.q, *new, out, sinks)
    torch.testing.assert_close(out, by_definition(case, window, sinks), rtol=1e-5, atol=1e-5)
    assert read_kv(case.pool, LAYERS[1], torch.from_numpy(case.batch.out_slots))[0].equal(new[0])


@pytest.mark.parametrize("softcap", [0.7, 3.0, 50.0])
@pytest.mark.parametrize(("window", "page_size"), [(None, 4), (5, 4), (33, 8)])
@pytest.mark.parametrize("attention", ["torch", "auto"])
def test_scores_are_capped_before_the_softmax(
    attention: str, window: int | None, page_size: int, softcap: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decode rows, also with a context that is split among work items, and chunks."""
    monkeypatch.setattr(query_blocks, "SCORES_AT_ONCE", 8 * HEADS * 21)
    case = make_case([1, 1, 21, 8], [30, 700, 21, 300], window, page_size, float("nan"))
    case.q *= 10  # scores from -30 to 30
    backend = build_attention(
        EngineConfig("m", attention=attention), case.pool, HEADS, SCALE, softcap=softcap
    )
    backend.prepare(case.batch)
    new = [
        torch.cat([side[i][-count:] for i, count in enumerate(case.batch.q_lens)])
        for side in (case.k, case.v)
    ]
    out = torch.full_like(case.q, torch.nan)
    backend.forward(1, case.q, *new, out)
    torch.testing.assert_close(out, by_definition(case, window, None, softcap), rtol=1e-4, atol=3e-5)


@pytest.mark.parametrize("with_sinks", [False, True], ids=["plain", "sinks"])
@pytest.mark.parametrize("window", [None, 900])
def test_plain_torch_holds_few_scores_of_a_chunk_with_a_long_context(
    window: int | None, with_sinks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No tensor is larger than the keys and values that are gathered: neither scores, nor a mask, nor keys
    repeated for each query head."""
    monkeypatch.setattr(query_blocks, "SCORES_AT_ONCE", 8 * HEADS * 1024)
    case = make_case([128, 1], [1024, 1024], window, 16, float("nan"))
    sinks = torch.zeros(HEADS) if with_sinks else None
    backend = build_attention(EngineConfig("m", attention="torch"), case.pool, HEADS, SCALE, with_sinks)
    new = [torch.cat([side[0][-128:], side[1][-1:]]) for side in (case.k, case.v)]
    out = torch.full_like(case.q, torch.nan)
    with LargestTensor() as largest:
        backend.prepare(case.batch)
        backend.forward(1, case.q, *new, out, sinks)
    assert largest.values <= 2 * KV_HEADS * 1024 * HEAD_DIM
    torch.testing.assert_close(out, by_definition(case, window, sinks), rtol=1e-5, atol=1e-5)
