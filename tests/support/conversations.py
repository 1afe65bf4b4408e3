"""Conversations whose answers are known, and workers whose memory is too small for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from kvcache.tiers.tiers import Tiers
from tests.support.hand_off import Output, Pair, held, pair, prompt_of
from tests.support.reference import MIN_MARGIN, REDRAWN, reference_answers
from tests.support.tiny_models import make_tiny
from wire.request import NO_MARKS, PromptMarks
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


Answers = Callable[[list[list[int]]], list[list[int]]]


class Speaker(NamedTuple):
    """Who asks in a conversation."""

    tenant: str = ""
    marks: PromptMarks = NO_MARKS


NOBODY = Speaker()


def converse(answers: Answers, conversations: int = CONVERSATIONS, common: int = 0) -> list[list[Turn]]:
    """By turn: what is asked in each conversation, and what is answered. A prompt is the last one with its
    answer, and some more tokens; the first `common` tokens are the same in all of them."""
    beginning = _tokens(conversations, common)
    rounds: list[list[Turn]] = []
    for number in range(TURNS):
        prompts = [
            [*before.prompt, *before.answer, *_tokens(100 * number + i, MORE_TOKENS)]
            for i, before in enumerate(rounds[-1] if rounds else ())
        ] or [[*beginning, *_tokens(i, FIRST_TOKENS - common)] for i in range(conversations)]
        rounds.append([Turn(*pair) for pair in zip(prompts, answers(prompts), strict=True)])
    return rounds


def _tokens(seed: int, length: int) -> list[int]:
    return [token % 250 for token in prompt_of(seed, length)]


@lru_cache(maxsize=4)
def known_conversations(
    family: str, directory: Path, conversations: int = CONVERSATIONS, common: int = 0, seed: int = 3
) -> tuple[Path, list[list[Turn]]]:
    """A tiny model that answers clearly (see `draw_model`), and conversations with transformers' answers."""
    for candidate in range(seed, seed + 50):
        path = make_tiny(family, directory, candidate)
        margins: list[float] = []

        def answer(
            prompts: list[list[int]], path: Path = path, margins: list[float] = margins
        ) -> list[list[int]]:
            answers = reference_answers(path, prompts, NEW_TOKENS)
            margins += [answer.margin for answer in answers]
            return [answer.tokens for answer in answers]

        rounds = converse(answer, conversations, common)
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

    def __init__(
        self,
        both: Pair,
        split: bool,
        times: int = 1,
        temperature: float = 0.0,
        speakers: Sequence[Speaker] = (),
    ) -> None:
        """`times`: how often each prompt is asked. A repeat sends it to the host under some policies.
        `speakers`, by conversation: nobody where there are none."""
        self.both = both
        self.workers = (both.prefill, both.decode) if split else (both.decode,)
        self._split = split
        self._times = times
        self._temperature = temperature
        self._speakers = speakers
        self._room = 0

    def outputs(self, prompts: Sequence[list[int]], speakers: Sequence[Speaker]) -> list[Output]:
        """Ask all at once, and wait until nothing moves."""
        rooms = range(self._room + 1, self._room + 1 + len(prompts))
        self._room += len(prompts)
        for room, prompt, speaker in zip(rooms, prompts, speakers, strict=True):
            self.both.ask(
                room,
                prompt,
                NEW_TOKENS,
                self._split,
                temperature=self._temperature,
                seed=len(prompt),
                **speaker._asdict(),
            )
        self.both.run_dry()
        outputs = [self.both.outputs[room] for room in rooms]
        for output in outputs:
            assert output.finish is not None, output.rejected
        return outputs

    def check(self, rounds: Sequence[Sequence[Turn]], together: bool = False) -> None:
        """All turns of all conversations: one after another, or those of a round `together`."""
        for number, turns in enumerate(rounds):
            asked = list(zip(turns, self._speakers or [NOBODY] * len(turns), strict=True))
            for batch in [asked] if together else [[one] for one in asked]:
                for time in range(self._times):
                    outputs = self.outputs([turn.prompt for turn, _ in batch], [who for _, who in batch])
                    where = f"round {number}, time {time}, {len(batch[0][0].prompt)} tokens"
                    assert [output.tokens for output in outputs] == [turn.answer for turn, _ in batch], where

    def answer(self, prompt: list[int], speaker: Speaker = NOBODY) -> list[int]:
        """Ask one."""
        return self.outputs([prompt], [speaker])[0].tokens

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
    options: dict[str, Any],
    split: bool,
    times: int = 1,
    temperature: float = 0.0,
    speakers: Sequence[Speaker] = (),
) -> Iterator[Served]:
    """A new pair of workers. At the end nothing failed to move, and nothing is held on any tier."""
    with pair(**options) as both:
        conversations = Served(both, split, times, temperature, speakers)
        yield conversations
        both.settle(60.0)
        for worker in (both.prefill, both.decode):
            assert held(worker) == {}
        for worker in conversations.workers:
            if (tiers := worker.parts.services.memory.tiers) is not None:
                assert tiers.moves.counts.failed_loads == tiers.moves.counts.failed_backups == 0
                assert tiers.storage is None or tiers.storage.counts.failed_writes == 0
