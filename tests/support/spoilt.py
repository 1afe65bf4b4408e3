"""An engine whose decode steps are spoilt: the oracle must see it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from engine.batch import ForwardBatch, Pending
from engine.runner import ModelRunner
from kvcache.pool import KVCache

Pool = TypeVar("Pool", bound=KVCache)


@dataclass
class Spoilt(Generic[Pool]):
    """`spoil` changes the batch, or the pool, before each decode step."""

    runner: ModelRunner
    pool: Pool
    spoil: Callable[[ForwardBatch, Pool], ForwardBatch]

    def __post_init__(self) -> None:
        self.spec = self.runner.spec

    def launch(self, batch: ForwardBatch) -> Pending:
        return self.runner.launch(self.spoil(batch, self.pool) if batch.q_lens[0] == 1 else batch)

    def close(self) -> None:
        self.runner.close()


def nothing(batch: ForwardBatch, _pool: KVCache) -> ForwardBatch:
    return batch
