"""Conversations whose answers are known, and workers whose memory is too small for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kvcache.tiers.tiers import Tiers
from tests.support.hand_off import Pair, held, pair, prompt_of
from tests.support.reference import MIN_MARGIN, REDRAWN, reference_generate
from tests.support.tiny_models import make_tiny
from worker.loop import Worker

CONVERSATIONS = 3
TURNS = 4
RESTART = 2
"""The turn before which the workers are started again, with nothing but what is in storage."""
NEW_TOKENS = 8
FIRST_TOKENS = 48
MORE_TOKENS = 13
"""That each turn's prompt has more than the last prompt and its answer."""
POOL_TOKENS = 128
"""Of each worker: a conversation's last turn fills it, two conversations' second turns do not fit."""


class Turn(NamedTuple):
    """One request, and what it must answer."""

    prompt: list[int]
    answer: list[int]


Answers = Callable[[list[int]], list[int]]


def converse(answers: Answers) -> list[list[Turn]]:
    """By turn: what is asked in each conversation, and what is answered. A prompt is the last one with its
    answer, and some more tokens."""
    rounds: list[list[Turn]] = []
    for number in range(TURNS):
        prompts = [
            [*before.prompt, *before.answer, *_tokens(100 * number + i, MORE_TOKENS)]
            for i, before in enumerate(rounds[-1] if rounds else ())
        ] or [_tokens(i, FIRST_TOKENS) for i in range(CONVERSATIONS)]
        rounds.append([Turn(prompt, answers(prompt)) for prompt in prompts])
    return rounds


def _tokens(seed: int, length: int) -> list[int]:
    return [token % 250 for token in prompt_of(seed, length)]


@lru_cache(maxsize=4)
def known_conversations(family: str, directory: Path, seed: int = 3) -> tuple[Path, list[list[Turn]]]:
    """A tiny model that answers clearly (see `draw_model`), and conversations with transformers' answers."""
    for candidate in range(seed, seed + 50):
        path = make_tiny(family, directory, candidate)
        margins: list[float] = []

        def answer(prompt: list[int], path: Path = path, margins: list[float] = margins) -> list[int]:
            tokens, margin = reference_generate(path, prompt, NEW_TOKENS)
            margins.append(margin)
            return tokens

        rounds = converse(answer)
        if min(margins) >= MIN_MARGIN:
            return path, rounds
        REDRAWN.append(f"{family}: seed {candidate} redrawn (margin, conversations)")
    raise AssertionError(f"no clear {family} model in 50 seeds")


def small(path: Path, storage: Path, **options: Any) -> dict[str, Any]:
    """Options of a worker that holds one conversation on the device, and has files in `storage`."""
    return {
        "model": str(path),
        "engine": "transformers",
        "dtype": "float32",
        "threads": 1,
        "max_total_tokens": POOL_TOKENS,
        "max_context_tokens": POOL_TOKENS,
        "max_mamba_cache_size": 6,
        "mamba_track_interval": 16,
        "max_running_requests": 2,
        "hicache_storage_backend": "file",
        "hicache_storage_path": storage,
        "hicache_storage_prefetch_threshold": 8,
        "hicache_storage_prefetch_if_slower": True,
        **options,
    }


def tiers_of(worker: Worker) -> Tiers:
    """The tiers of a worker that has some."""
    tiers = worker.parts.services.memory.tiers
    assert tiers is not None
    return tiers


class Served:
    """Conversations on a pair of workers."""

    def __init__(self, both: Pair, split: bool, times: int = 1, temperature: float = 0.0) -> None:
        """`times`: how often each prompt is asked. A repeat sends it to the host under some policies."""
        self.both = both
        self.workers = (both.prefill, both.decode) if split else (both.decode,)
        self._split = split
        self._times = times
        self._temperature = temperature
        self._room = 0

    def answers(self, prompts: Sequence[list[int]]) -> list[list[int]]:
        """Ask all at once, and wait until nothing moves."""
        rooms = range(self._room + 1, self._room + 1 + len(prompts))
        self._room += len(prompts)
        for room, prompt in zip(rooms, prompts, strict=True):
            self.both.ask(
                room, prompt, NEW_TOKENS, self._split, temperature=self._temperature, seed=len(prompt)
            )
        self.both.run_dry()
        outputs = [self.both.outputs[room] for room in rooms]
        for output in outputs:
            assert output.finish is not None, output.rejected
        return [output.tokens for output in outputs]

    def check(self, rounds: Sequence[Sequence[Turn]], together: bool = False) -> None:
        """All turns of all conversations: one after another, or those of a round `together`."""
        for number, turns in enumerate(rounds):
            for batch in [turns] if together else [[turn] for turn in turns]:
                for time in range(self._times):
                    tokens = self.answers([turn.prompt for turn in batch])
                    where = f"round {number}, time {time}, {len(batch[0].prompt)} tokens"
                    assert tokens == [turn.answer for turn in batch], where

    def answer(self, prompt: list[int]) -> list[int]:
        """Ask one."""
        return self.answers([prompt])[0]

    def evicted(self) -> int:
        """Pages that left the device, of the worker that has evicted least."""
        return min(worker.parts.services.memory.allocator.evicted for worker in self.workers)

    def loads(self) -> int:
        """From the host to the device, on the worker that has loaded least."""
        return min(tiers_of(worker).moves.counts.loads for worker in self.workers)

    def read_pages(self) -> int:
        """From storage, on the worker that has read least."""
        storages = [tiers_of(worker).storage for worker in self.workers]
        return min(storage.counts.read_pages if storage is not None else 0 for storage in storages)


@contextmanager
def served(
    options: dict[str, Any], split: bool, times: int = 1, temperature: float = 0.0
) -> Iterator[Served]:
    """A new pair of workers. At the end nothing failed to move, and nothing is held on any tier."""
    with pair(**options) as both:
        conversations = Served(both, split, times, temperature)
        yield conversations
        both.settle(60.0)
        for worker in (both.prefill, both.decode):
            assert held(worker) == {}
        for worker in conversations.workers:
            if (tiers := worker.parts.services.memory.tiers) is not None:
                assert tiers.moves.counts.failed_loads == tiers.moves.counts.failed_backups == 0
                assert tiers.storage is None or tiers.storage.counts.failed_writes == 0
