"""Generated traces whose load changes: a day of 40 minutes, and a mix that shifts.

Three kinds of requests arrive, each as a Poisson process with a rate of its own: questions with short prompts
and answers, documents with long prompts (prefill), and problems with long answers (decode).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator
from itertools import count
from typing import NamedTuple

import numpy as np

from simulator.options import WorkerModel
from simulator.request import TraceRequest
from simulator.simulation import Trace

BLOCK = WorkerModel.page_tokens  # tokens that one hash id stands for
DAY_S = 2400.0
_SHIFT_S = 2400.0
_SYSTEM_BLOCKS = 2  # every request begins with the same ones


class _Kind(NamedTuple):
    prompt: tuple[int, int]  # fewest and most tokens, beyond the system prompt; logarithmically uniform
    output: tuple[int, int]


_QUESTION = _Kind((200, 3000), (50, 500))
_DOCUMENT = _Kind((2000, 10_000), (50, 300))
_PROBLEM = _Kind((200, 1500), (1000, 5000))

_Rate = Callable[[float], float]  # arrivals per second at a time


def diurnal(name: str, chance: random.Random) -> Trace:
    """One day from night to night. Documents peak before noon, problems in the afternoon, questions between.
    At a seeded time, problems come 1.5 times as often for two minutes."""
    burst = chance.uniform(0.3, 0.7) * DAY_S

    def wave(mean: float, peak_at: float) -> _Rate:
        swing = chance.uniform(0.7, 0.8)
        shifted = peak_at + chance.uniform(-0.05, 0.05)
        return lambda at: mean * (1 + swing * math.cos(2 * math.pi * (at / DAY_S - shifted)))

    problems = wave(8.0, 0.6)
    rates = {
        _QUESTION: wave(4.0, 0.5),
        _DOCUMENT: wave(15.0, 0.42),
        _PROBLEM: lambda at: problems(at) * (1.5 if burst <= at < burst + 120 else 1.0),
    }
    return _mixed(name, chance, rates, DAY_S)


def shift(name: str, chance: random.Random) -> Trace:
    """A time in which documents and problems take turns: four phases of about ten minutes."""
    ends = [_SHIFT_S * (0.25 * phase + chance.uniform(-0.05, 0.05)) for phase in (1, 2, 3)]
    lively = chance.randrange(2)

    def turns(high: float, low: float, parity: int) -> _Rate:
        return lambda at: high if sum(at >= end for end in ends) % 2 == parity else low

    rates = {
        _QUESTION: lambda _at: 1.0,
        _DOCUMENT: turns(20.0, 2.0, lively),
        _PROBLEM: turns(14.0, 2.0, 1 - lively),
    }
    return _mixed(name, chance, rates, _SHIFT_S)


def _mixed(name: str, chance: random.Random, rates: dict[_Kind, _Rate], seconds: float) -> Trace:
    ids = count(_SYSTEM_BLOCKS)
    requests = [
        _request(chance, ids, at, kind)
        for kind, rate in rates.items()
        for at in _arrivals(chance, rate, seconds)
    ]
    return Trace(name, sorted(requests, key=lambda one: one.at_s))


def _request(chance: random.Random, ids: Iterator[int], at: float, kind: _Kind) -> TraceRequest:
    prompt = _SYSTEM_BLOCKS * BLOCK + _between(chance, kind.prompt)
    blocks = [*range(_SYSTEM_BLOCKS), *(next(ids) for _ in range(prompt // BLOCK - _SYSTEM_BLOCKS))]
    return TraceRequest(at, prompt, _between(chance, kind.output), np.array(blocks, np.int64))


def _between(chance: random.Random, bounds: tuple[int, int]) -> int:
    return round(math.exp(chance.uniform(math.log(bounds[0]), math.log(bounds[1]))))


def _arrivals(chance: random.Random, rate: _Rate, seconds: float) -> Iterator[float]:
    """A Poisson process whose rate changes, by thinning one that is fast enough."""
    fastest = 1.1 * max(rate(at) for at in np.linspace(0.0, seconds, 1000).tolist())
    at = chance.expovariate(fastest)
    while at < seconds:
        if chance.random() * fastest < rate(at):
            yield at
        at += chance.expovariate(fastest)
