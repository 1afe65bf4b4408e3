"""Every family with several tenants over all tiers, against transformers.generate.

Four tenants have a conversation each, with one beginning; the last one's is private for ever from its second
page on. The device's pool holds one of them. Between their turns epochs end, so that the beginning becomes
public, and its copies give way, while parts of it are on the host and in storage. Then the workers are
started again, and find it in storage under both names. A stranger who asks what a tenant has asked finds what
is public, and no more. `make tenancy` runs all of it.
"""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from kvcache.tiers.config import PREFETCH_POLICIES, WRITE_POLICIES
from tests.support.conversations import RESTART, Served, Speaker, Turn, known_conversations, served, small
from tests.support.oracle import DENSE, EVERY, LATENT, covering
from wire.request import PromptMarks
from worker.loop import Worker

COMMON_TOKENS = 32
SPEAKERS = (Speaker("a"), Speaker("b"), Speaker("c"), Speaker("d", PromptMarks(private_from=1)))
EPOCH_S = 30.0
IN_MAKE_TEST = ("qwen3", "deepseek_v3", "gpt_oss", "lfm2")


def cases() -> list[Any]:
    """Every family with every pair of policies; both with all else. A family's follow each other: its answers
    are computed once."""
    policies = list(product(WRITE_POLICIES, PREFETCH_POLICIES))
    rows: list[Any] = covering(
        [EVERY, policies, (True, False), (4, 16), (24, None), (8.0, 1.0), (True, False)]
    )
    marked, quick = [], set(IN_MAKE_TEST)
    for row in sorted(rows, key=lambda row: EVERY.index(row[0])):
        family, (write, prefetch), split, page_size, chunk, ratio, together = row
        mark = pytest.mark.oracle if family in quick and split and ratio > 1 else pytest.mark.oracle_full
        if mark is pytest.mark.oracle:
            quick.discard(family)
        place, order = "apart" if split else "colocated", "together" if together else "in-turn"
        name = f"{family}-{write}-{prefetch}-{place}-page{page_size}-chunk{chunk}-host{ratio:.0f}-{order}"
        marked.append(pytest.param(*row, id=name, marks=mark))
    return marked


@pytest.mark.parametrize(("family", "policies", "split", "page_size", "chunk", "ratio", "together"), cases())
def test_the_oracle_with_tenants_over_all_tiers(
    family: str,
    policies: tuple[str, str],
    split: bool,
    page_size: int,
    chunk: int | None,
    ratio: float,
    together: bool,
    tmp_path: Path,
    tmp_path_factory: Any,
) -> None:
    write, prefetch = policies
    path, rounds = known_conversations(
        family, tmp_path_factory.getbasetemp(), len(SPEAKERS), common=COMMON_TOKENS
    )
    options = small(
        path,
        tmp_path / "kv",
        page_size=page_size,
        chunked_prefill_size=chunk,
        hicache_ratio=ratio,
        hicache_write_policy=write,
        hicache_storage_prefetch_policy=prefetch,
        sharing_min_tenants=2,
        sharing_epoch_s=EPOCH_S,
    )
    times = 2 if write == "write_through_selective" else 1
    for turns in (rounds[:RESTART], rounds[RESTART:]):
        with served(options, split, times, speakers=SPEAKERS) as conversations:
            for turn in turns:
                conversations.check([turn], together)
                conversations.both.pass_time(2 * EPOCH_S)
            public = {_public_tokens(worker) for worker in conversations.workers}
            if ratio > 1 and write != "write_through_selective":  # else copies are lost before the epoch ends
                assert public == {COMMON_TOKENS}
            if turns[-1] is rounds[-1]:  # the second one to ask it may make it public
                found = _check_stranger(conversations, turns[0][0])
                if family in (*DENSE, *LATENT):
                    assert found >= max(public), "some may be in storage alone"


def _public_tokens(worker: Worker) -> int:
    """Tokens of the pages that are public there now."""
    memory = worker.parts.services.memory
    return sum(node.num_tokens for node in memory.cache.tree.nodes() if not node.tenant)


def _check_stranger(conversations: Served, turn: Turn) -> int:
    """A tenant that has never asked anything asks what another one has. Returns the tokens that it found."""
    (output,) = conversations.outputs([turn.prompt], [Speaker("stranger")])
    assert output.tokens == turn.answer
    assert output.cached_tokens <= COMMON_TOKENS, "more than is everybody's"
    return output.cached_tokens
