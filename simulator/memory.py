"""WorkerMemory: the KV memory of one modelled worker, and what each attempt has of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from simulator.attempt import Attempt
from simulator.cache import PrefixCache
from simulator.options import WorkerModel


@dataclass(slots=True)
class _Share:
    """What one attempt has."""

    pages: int  # leading pages of its prompt, locked in the cache
    tokens: int  # outside the cache
    has_row: bool  # it decodes here, so it counts against `max_running`


class WorkerMemory:
    """Gives attempts memory and takes it back."""

    def __init__(
        self,
        model: WorkerModel,
        stored: Callable[[list[int]], None],
        removed: Callable[[list[int]], None],
    ) -> None:
        """`stored` and `removed` are called with the pages that enter and leave the cache."""
        self.cache = PrefixCache(model.kv_tokens, model.page_tokens, stored, removed)
        self._max_rows = model.max_running
        self._rows = 0
        self._shares: dict[Attempt, _Share] = {}

    @property
    def free_rows(self) -> int:
        """Requests that may be reserved besides those that are."""
        return self._max_rows - self._rows

    @property
    def idle(self) -> bool:
        """Whether no attempt has anything."""
        return not self._shares

    def reserve(self, attempt: Attempt, usable: int) -> bool:
        """Take a row, and memory for the prompt and all its output. See `take`."""
        if self._rows == self._max_rows:
            return False
        if not self._take(attempt, attempt.prompt + attempt.output, usable, has_row=True):
            return False
        self._rows += 1
        return True

    def take(self, attempt: Attempt, usable: int) -> bool:
        """Take memory for the prompt, of which cached pages among the first `usable` tokens are used.

        Returns False, and takes nothing, when there is not enough.
        """
        return self._take(attempt, attempt.prompt, usable, has_row=False)

    def lock_prompt(self, attempt: Attempt) -> bool:
        """Lock a prompt that was computed earlier. Returns False when some of it was evicted meanwhile."""
        if self.cache.match(attempt.hashes) < len(attempt.hashes):
            return False
        self.cache.lock(attempt.hashes)
        self._shares[attempt] = _Share(len(attempt.hashes), 0, has_row=False)
        return True

    def insert(self, attempt: Attempt, tokens: int) -> None:
        """The whole pages among the prompt's first `tokens` tokens are computed: put them in the cache."""
        share = self._shares[attempt]
        new = attempt.hashes[share.pages : tokens // self.cache.page]
        self.cache.insert(new)
        share.tokens -= len(new) * self.cache.page
        share.pages += len(new)

    def cached_tokens(self, attempt: Attempt) -> int:
        """Prompt tokens of an attempt that are locked in the cache."""
        return self._shares[attempt].pages * self.cache.page

    def release(self, attempt: Attempt) -> None:
        """Take back everything that the attempt has. It may have nothing."""
        share = self._shares.pop(attempt, None)
        if share is not None:
            self._rows -= share.has_row
            self.cache.unlock(attempt.hashes[: share.pages])
            self.cache.release(share.tokens)

    def _take(self, attempt: Attempt, tokens: int, usable: int, has_row: bool) -> bool:
        hashes = attempt.hashes[: usable // self.cache.page]
        matched = hashes[: self.cache.match(hashes)]
        self.cache.lock(matched)
        rest = tokens - len(matched) * self.cache.page
        if not self.cache.hold(rest):
            self.cache.unlock(matched)
            return False
        self._shares[attempt] = _Share(len(matched), rest, has_row)
        return True
