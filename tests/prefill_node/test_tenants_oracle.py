"""Every family with several tenants over all tiers, against transformers.generate.

Four tenants have a conversation each, with one beginning; the last one's is private for ever from its second
page on. The device's pool holds one of them. Between their turns epochs end, so that the beginning becomes
public, and its copies give way, while parts of it are on the host and in storage. Then the workers are
started again, and find it in storage under both names. A stranger who asks what a tenant has asked finds what
is public, and no more. `make tenancy` runs all of it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.conversations import RESTART, Served, Speaker, Turn, known_conversations, served
from tests.support.oracle import DENSE, LATENT
from tests.support.tier_cases import POLICIES, TierCase, tier_cases
from wire.request import PromptMarks
from worker.loop import Worker

COMMON_TOKENS = 32
SPEAKERS = (Speaker("a"), Speaker("b"), Speaker("c"), Speaker("d", PromptMarks(private_from=1)))
EPOCH_S = 30.0
IN_MAKE_TEST = ("qwen3", "deepseek_v3", "gpt_oss", "lfm3")


@pytest.mark.parametrize("case", tier_cases(set(zip(IN_MAKE_TEST, POLICIES[::2], strict=False))))
def test_the_oracle_with_tenants_over_all_tiers(
    case: TierCase, tmp_path: Path, tmp_path_factory: Any
) -> None:
    path, rounds = known_conversations(
        case.family, tmp_path_factory.getbasetemp(), len(SPEAKERS), common=COMMON_TOKENS
    )
    options = case.options(path, tmp_path / "kv", sharing_min_tenants=2, sharing_epoch_s=EPOCH_S)
    for turns in (rounds[:RESTART], rounds[RESTART:]):
        with served(options, case.split, case.ask_times, speakers=SPEAKERS) as conversations:
            for turn in turns:
                conversations.check([turn], case.together)
                conversations.both.pass_time(2 * EPOCH_S)
            public = {_public_tokens(worker) for worker in conversations.workers}
            keeps = case.host_ratio > 1 and case.policies[0] != "write_through_selective"
            if keeps:  # elsewhere copies are lost before the epoch ends
                assert public == {COMMON_TOKENS}
            if turns[-1] is rounds[-1]:  # the second one to ask it may make it public
                found = _check_stranger(conversations, turns[0][0])
                if keeps and case.family in (*DENSE, *LATENT):
                    assert found == COMMON_TOKENS


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
