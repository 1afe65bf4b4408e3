"""Law number one over conversations: 200 a family, with forks, served and then judged by transformers.

A conversation has three turns, and half of them begin as a fork: they continue an earlier turn of another one
in different words. Greedy means that every token is the likeliest after all before it: ONE forward of
transformers over a whole conversation checks all its outputs. Every tenth is asked of `generate` besides.

Among 10,000 tokens of a random model a few are ties but for rounding (MIN_MARGIN); there either is right, and
what follows is judged after the one that was said.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.harness.local_stack import Stack, stack
from tests.support.oracle import EVERY
from tests.support.reference import MIN_MARGIN, draw_model, reference_generate, reference_greedy

CONVERSATIONS = 200
AT_ONCE = 8
TURNS = 3
REPLY = 16
LONGEST_FORK = 200  # tokens of history


class Served(NamedTuple):
    """How a family is served: every family colocated and apart, transports and page sizes in turn."""

    model_type: str
    path: str
    page_size: int
    chunk: int
    overlap: int

    def __str__(self) -> str:
        return f"{self.model_type}-{self.path}-page{self.page_size}"


def cases() -> Iterator[Served]:
    for i, family in enumerate(EVERY):
        yield Served(family, "colocated", (16, 1)[i % 2], 20, 1)
        yield Served(family, ("shm", "tcp", "mooncake")[i % 3], (1, 16)[i % 2], 56, i // 2 % 2)


class Turn(NamedTuple):
    """One exchange. The prompt holds all before it."""

    prompt: list[int]
    reply: list[int]
    cached: int


@dataclass
class Conversation:
    """What was said, and what will be asked."""

    history: list[int]  # of the conversation that it forks from
    questions: list[list[int]]
    turns: list[Turn] = field(default_factory=list)

    def run(self, served: Stack) -> None:
        """All turns, one after the other."""
        said = self.history
        for question in self.questions:
            prompt = said + question
            answer = served.generate(prompt, REPLY)
            self.turns.append(Turn(prompt, answer["output_ids"], answer["meta_info"]["cached_tokens"]))
            said = prompt + answer["output_ids"]

    def check(self, model: Path, with_generate: bool) -> None:
        """Every reply is transformers'."""
        last = self.turns[-1]
        greedy = reference_greedy(model, [*last.prompt, *last.reply])
        for turn in self.turns:
            begin = len(turn.prompt)
            choices = greedy[begin - 1 : begin - 1 + REPLY]
            assert len(turn.reply) == REPLY
            wrong = [
                (place, token, right)
                for place, (token, right) in enumerate(zip(turn.reply, choices, strict=True))
                if token not in right
            ]
            assert not wrong, f"after {begin} tokens: {wrong}"
            if with_generate:
                said, margin = reference_generate(model, turn.prompt, REPLY)
                assert turn.reply == said or margin < MIN_MARGIN


def conversations(seed: str, served: Stack) -> list[Conversation]:
    """Run them, AT_ONCE at once. A fork's root is among the three dozen before."""
    rng = random.Random(seed)
    systems = [[rng.randrange(256) for _ in range(count)] for count in (33, 48, 7)]
    done: list[Conversation] = []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        while len(done) < CONVERSATIONS:
            group = []
            for _ in range(AT_ONCE):
                history: list[int] = []
                if done and rng.random() < 0.5:
                    root = rng.choice(done[-36:]).turns[rng.randrange(TURNS - 1)]
                    history = [*root.prompt, *root.reply]
                if not history or len(history) > LONGEST_FORK:
                    history = rng.choice(systems)
                questions = [[rng.randrange(256) for _ in range(rng.randint(1, 50))] for _ in range(TURNS)]
                group.append(Conversation(history, questions))
            list(pool.map(lambda conversation: conversation.run(served), group))
            done += group
    return done


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The family's model, drawn when it is first asked for."""
    directory = tmp_path_factory.mktemp("conversations")
    rng = random.Random(3)
    prompts = [[rng.randrange(256) for _ in range(count)] for count in (9, 60)]

    class Drawn(dict[str, Path]):
        def __missing__(self, family: str) -> Path:
            self[family] = draw_model(family, directory, 1, prompts)[0]
            return self[family]

    return Drawn()


@pytest.mark.oracle_full
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", list(cases()), ids=str)
def test_oracle_conversations(case: Served, models: dict[str, Path], tmp_path: Path) -> None:
    split = case.path != "colocated"
    with stack(
        models[case.model_type],
        tmp_path,
        prefill=int(split),
        decode=1,
        router={"prefill_on_decode_tokens": 0, "max_queued": 0},
        dtype="float32",
        threads=1,
        page_size=case.page_size,
        chunked_prefill_size=case.chunk,
        max_total_tokens=16384,
        max_context_tokens=1024,
        max_running_requests=16,
        max_mamba_cache_size=256,
        mamba_track_interval=32,
        swa_full_tokens_ratio=0.8,  # of entries, too, that no window of a conversation is given up
        overlap_depth=case.overlap,
        **({"kv_transfer_backend": case.path} if split else {}),
    ) as served:
        done = conversations(case.model_type, served)
        served.settle()
    for i, conversation in enumerate(done):
        conversation.check(models[case.model_type], with_generate=i % 10 == 0)
        for before, turn in zip(conversation.turns, conversation.turns[1:], strict=False):
            whole_pages = (len(before.prompt) - 1) // case.page_size * case.page_size
            assert turn.cached >= whole_pages, "the turn before is not found in the cache"
    forked = [one.turns[0] for one in done if len(one.history) > 48]
    assert len(forked) > CONVERSATIONS // 4
    assert sum(turn.cached > 0 for turn in forked) > 0.9 * len(forked)
    assert len({token for one in done for turn in one.turns for token in turn.reply}) > 100
