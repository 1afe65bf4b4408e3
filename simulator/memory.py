"""WorkerMemory: the KV memory of one modelled worker in all its tiers, and what each attempt has of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from simulator.attempt import Attempt
from simulator.cache import PrefixCache
from simulator.modelled_tier import ModelledTier
from simulator.options import WorkerModel

Told = Callable[[list[int], str], None]
"""Called with pages and the medium that they enter or leave, as KV events name it."""


class Found(NamedTuple):
    """The leading pages of a prompt that are here, by the tier from which they come. On the device there are
    the first ones; the others may be mixed."""

    device: int
    host: int
    storage: int

    @property
    def all(self) -> int:
        """Pages in any tier."""
        return self.device + self.host + self.storage


@dataclass(slots=True)
class _Share:
    """What one attempt has."""

    pages: int  # leading pages of its prompt, locked in the cache
    tokens: int  # outside the cache
    has_row: bool  # it decodes here, so it counts against `max_running`


class WorkerMemory:
    """Gives attempts memory and takes it back."""

    def __init__(self, model: WorkerModel, stored: Told, removed: Told) -> None:
        """`stored` and `removed` are called with the pages that enter and leave each tier."""
        page = model.page_tokens

        def tier(tokens: int, medium: str, below: ModelledTier | None) -> ModelledTier | None:
            if tokens < page:
                return None
            told = (lambda pages: stored(pages, medium)), (lambda pages: removed(pages, medium))
            return ModelledTier(tokens // page, *told, below)

        self.cache = PrefixCache(
            model.kv_tokens, page, lambda pages: stored(pages, "GPU"), lambda pages: removed(pages, "GPU")
        )
        self._storage = tier(model.storage_tokens, "STORAGE", None)
        self._host = tier(model.host_tokens, "CPU", self._storage)
        self._max_rows = model.max_running
        self._rows = 0
        self._shares: dict[Attempt, _Share] = {}
        self._arriving: dict[Attempt, _Share] = {}  # what is reserved for pages that are fetched or loaded

    @property
    def free_rows(self) -> int:
        """Requests that may be reserved besides those that are."""
        return self._max_rows - self._rows

    @property
    def idle(self) -> bool:
        """Whether no attempt has anything."""
        return not self._shares and not self._arriving

    def pages(self) -> dict[str, set[int]]:
        """All pages, by the medium of their tier."""
        tiers = {"CPU": self._host, "STORAGE": self._storage}
        lower = {medium: tier.pages() for medium, tier in tiers.items() if tier is not None}
        return {"GPU": self.cache.pages(), **lower}

    def find(self, attempt: Attempt, usable: int) -> Found:
        """What is here of the prompt's first `usable` tokens. Changes nothing."""
        hashes = attempt.hashes[: usable // self.cache.page]
        device, host, storage = self.cache.match(hashes), 0, 0
        for page in hashes[device:].tolist():
            if self._host is not None and page in self._host:
                host += 1
            elif self._storage is not None and page in self._storage:
                storage += 1
            else:
                break
        return Found(device, host, storage)

    # -- pages that arrive from elsewhere --------------------------------------------------------------

    def expect(self, attempt: Attempt, pages: int) -> bool:
        """Reserve memory on the device for the prompt's first `pages` pages. Returns False without room."""
        hashes = attempt.hashes[:pages]
        matched = hashes[: self.cache.match(hashes)]
        self.cache.lock(matched)
        rest = (pages - len(matched)) * self.cache.page
        if not self.cache.hold(rest):
            self.cache.unlock(matched)
            return False
        self._arriving[attempt] = _Share(len(matched), rest, has_row=False)
        return True

    def arrived(self, attempt: Attempt, pages: int, fetched: bool) -> None:
        """They have come. They stay until `take`, `reserve` or `forget`."""
        share = self._arriving[attempt]
        self.cache.insert(attempt.hashes[: share.pages], attempt.hashes[share.pages : pages], fetched)
        share.pages, share.tokens = pages, 0

    def forget(self, attempt: Attempt) -> None:
        """Give back what an attempt has of arriving pages, if anything."""
        share = self._arriving.pop(attempt, None)
        if share is not None:
            self.cache.unlock(attempt.hashes[: share.pages])
            self.cache.release(share.tokens)

    # -- attempts --------------------------------------------------------------------------------------

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
        share, pages = self._shares[attempt], tokens // self.cache.page
        new = attempt.hashes[share.pages : pages]
        if len(new):
            self.cache.insert(attempt.hashes[: share.pages], new)
            if self._host is not None:
                self._host.put(attempt.hashes[:pages].tolist())
        share.tokens -= len(new) * self.cache.page
        share.pages += len(new)

    def cached_tokens(self, attempt: Attempt) -> int:
        """Prompt tokens of an attempt that are locked in the cache."""
        return self._shares[attempt].pages * self.cache.page

    def release(self, attempt: Attempt) -> None:
        """Take back everything that the attempt has. It may have nothing."""
        self.forget(attempt)
        share = self._shares.pop(attempt, None)
        if share is not None:
            self._rows -= share.has_row
            self.cache.unlock(attempt.hashes[: share.pages])
            self.cache.release(share.tokens)

    def _take(self, attempt: Attempt, tokens: int, usable: int, has_row: bool) -> bool:
        hashes = attempt.hashes[: usable // self.cache.page]
        matched = hashes[: self.cache.match(hashes)]
        self.cache.lock(matched)
        self.forget(attempt)
        rest = tokens - len(matched) * self.cache.page
        if not self.cache.hold(rest):
            self.cache.unlock(matched)
            return False
        self._shares[attempt] = _Share(len(matched), rest, has_row)
        for tier in (self._host, self._storage):
            if tier is not None:
                tier.touch(hashes.tolist())
        return True
