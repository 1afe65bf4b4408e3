"""Traces: files in Mooncake's format, and traces generated from a seed.

A file has one JSON object per line: `timestamp` (ms, from any time on: the first request comes at 0),
`input_length`, `output_length` (tokens) and `hash_ids`, with one id per block of 512 tokens. Equal ids mean
that everything up to the end of the block is equal. `session`, `tenant` and `priority` are optional. A
generated trace is named KIND:SEED, for example `chat:1`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import count
from pathlib import Path

import msgspec
import numpy as np

from common.errors import ConfigError
from simulator.day_traces import BLOCK, diurnal, shift
from simulator.request import TraceRequest
from simulator.simulation import Restart, Trace


class _Line(msgspec.Struct):
    timestamp: float
    input_length: int
    output_length: int
    hash_ids: list[int]
    session: str = ""
    tenant: str = ""
    priority: int = 0


def read_trace(name: str) -> Trace:
    """Read a file, or generate a trace named KIND:SEED. Raises ConfigError for any other name."""
    kind, colon, seed = name.partition(":")
    if colon and kind in GENERATORS and not Path(name).exists():
        if not seed.isdecimal():
            raise ConfigError("TRACE", f"{seed!r} is not a seed", f"for example {kind}:1")
        return GENERATORS[kind](name, random.Random(name))
    try:
        with open(name, "rb") as file:
            lines = [line for line in file if line.strip()]
    except OSError as error:
        known = ", ".join(f"{kind}:SEED" for kind in GENERATORS)
        raise ConfigError("TRACE", f"cannot read {name}: {error.strerror}", f"a file, or {known}") from None
    return _parse(name, lines)


def _parse(name: str, lines: list[bytes]) -> Trace:
    decoder, requests = msgspec.json.Decoder(_Line), []
    for number, line in enumerate(lines, 1):
        try:
            one = decoder.decode(line)
            if one.input_length < 1 or one.output_length < 1 or len(one.hash_ids) * BLOCK < one.input_length:
                raise ValueError("lengths must be positive, with a hash id for every 512 tokens begun")
            hashes = np.array(one.hash_ids[: one.input_length // BLOCK], np.int64)
        except OverflowError:
            raise ConfigError(
                "TRACE",
                f"{name} line {number}: a hash id of more than 64 bits, with its sign",
                "number the blocks",
            ) from None
        except (msgspec.MsgspecError, ValueError) as error:
            raise ConfigError("TRACE", f"{name} line {number}: {error}", "see the documentation") from None
        requests.append(
            TraceRequest(
                one.timestamp / 1000,
                one.input_length,
                one.output_length,
                hashes,
                one.session,
                one.tenant,
                one.priority,
            )
        )
    if not requests:
        raise ConfigError("TRACE", f"{name} is empty", "give a trace with requests")
    first_s = min(one.at_s for one in requests)
    from_zero = (replace(one, at_s=one.at_s - first_s) for one in requests)
    return Trace(Path(name).stem, sorted(from_zero, key=lambda one: one.at_s))


def _request(
    at_s: float, prompt: int, output: int, blocks: list[int], session: str = "", tenant: str = ""
) -> TraceRequest:
    return TraceRequest(at_s, prompt, output, np.array(blocks[: prompt // BLOCK], np.int64), session, tenant)


def _chat(name: str, chance: random.Random) -> Trace:
    """Ten minutes of conversations, two a second. They have several turns and share one system prompt."""
    ids, requests = count(), list[TraceRequest]()
    shared = _blocks(ids, 2)
    for session, start in enumerate(_arrivals(chance, rate=2.0, seconds=600.0)):
        requests += _conversation(chance, ids, f"chat {session}", start, shared, question=(200, 2000))
    return _ordered(name, requests)


def _tenants(name: str, chance: random.Random) -> Trace:
    """Half an hour of 60 tenants: 60 documents that 30 to 60 of them read, all below one system prompt, and
    conversations of each."""
    ids, requests = count(), list[TraceRequest]()
    system, tenants = _blocks(ids, 2), [f"tenant {number}" for number in range(60)]
    for _ in range(60):
        document = system + _blocks(ids, chance.randint(4, 24))
        for tenant in chance.sample(tenants, chance.randint(30, 60)):
            requests.append(_tail(chance, ids, chance.uniform(0, 1800), document, (50, 500), tenant))
    for tenant in tenants:
        for session in range(15):
            start, named = chance.uniform(0, 1800), f"{tenant} chat {session}"
            requests += _conversation(chance, ids, named, start, system, (200, 2000), tenant)
    return _ordered(name, requests)


def _conversation(
    chance: random.Random,
    ids: Iterator[int],
    session: str,
    start: float,
    blocks: list[int],
    question: tuple[int, int],
    tenant: str = "",
) -> list[TraceRequest]:
    """Each turn's prompt is everything before it and a question. The next prompt includes the answer."""
    turns, at, requests = 1 + int(chance.expovariate(1 / 4)), start, []
    blocks, length = list(blocks), len(blocks) * BLOCK
    for _ in range(turns):
        length += chance.randint(*question)
        blocks += _blocks(ids, -(-length // BLOCK) - len(blocks))
        output = min(1000, 2 + int(chance.expovariate(1 / 200)))
        requests.append(_request(at, length, output, blocks, session, tenant))
        if length % BLOCK:
            blocks = blocks[:-1]  # the answer completes this page, which changes its hash
        length += output
        at += output * 0.02 + chance.expovariate(1 / 20)
    return requests


def _hot(name: str, chance: random.Random) -> Trace:
    """Ten minutes with one hot prefix, more documents than fit in memory, and two workers that restart.

    Six of ten requests begin with one system prompt of 24 blocks and one of 40 tool lists. The others read
    documents, a few requests close in time per document. Together these exceed eight pools of 1 M tokens.
    """
    ids, requests = count(), list[TraceRequest]()
    hot = _blocks(ids, 24)
    tools = [hot + _blocks(ids, 12) for _ in range(40)]
    for at in _arrivals(chance, rate=3.6, seconds=600.0):
        blocks = tools[min(39, int(chance.expovariate(1 / 8)))]
        requests.append(_tail(chance, ids, at, blocks, tail=(200, 3000)))
    for at in _arrivals(chance, rate=0.6, seconds=600.0):
        document = _blocks(ids, chance.randint(16, 80))
        readings = 1 + int(chance.expovariate(1 / 3))
        for reading in range(readings):
            when = at + reading * chance.expovariate(1 / 15)
            requests.append(_tail(chance, ids, when, document, tail=(50, 500)))
    restarts = (Restart(200.0, "p1", 10.0), Restart(400.0, "p2", 10.0))
    return Trace(name, sorted(requests, key=lambda one: one.at_s), restarts)


def _agents(name: str, chance: random.Random) -> Trace:
    """Bursts: a task is 4 to 24 calls with a common prefix, most of them at nearly the same time."""
    ids, requests = count(), list[TraceRequest]()
    system = _blocks(ids, 8)
    for at in _arrivals(chance, rate=0.5, seconds=600.0):
        task = system + _blocks(ids, chance.randint(4, 24))
        for _ in range(chance.randint(4, 24)):
            requests.append(_tail(chance, ids, at + chance.expovariate(1 / 0.5), task, tail=(100, 1500)))
    return _ordered(name, requests)


def _long(name: str, chance: random.Random) -> Trace:
    """Long prompts without any common prefix, and short answers."""
    ids, requests = count(), list[TraceRequest]()
    for at in _arrivals(chance, rate=4.0, seconds=600.0):
        requests.append(_tail(chance, ids, at, _blocks(ids, chance.randint(8, 90)), tail=(1, 511)))
    return _ordered(name, requests)


def _tail(
    chance: random.Random,
    ids: Iterator[int],
    at: float,
    blocks: list[int],
    tail: tuple[int, int],
    tenant: str = "",
) -> TraceRequest:
    """A prompt that begins with these blocks and ends with tokens of its own."""
    own = chance.randint(*tail)
    output = min(1000, 2 + int(chance.expovariate(1 / 150)))
    hashes = blocks + _blocks(ids, -(-own // BLOCK))
    return _request(at, len(blocks) * BLOCK + own, output, hashes, tenant=tenant)


def _arrivals(chance: random.Random, rate: float, seconds: float) -> Iterator[float]:
    at = chance.expovariate(rate)
    while at < seconds:
        yield at
        at += chance.expovariate(rate)


def _blocks(ids: Iterator[int], many: int) -> list[int]:
    return [next(ids) for _ in range(many)]


def _ordered(name: str, requests: list[TraceRequest]) -> Trace:
    return Trace(name, sorted(requests, key=lambda one: one.at_s))


GENERATORS: dict[str, Callable[[str, random.Random], Trace]] = {
    "chat": _chat,
    "hot": _hot,
    "agents": _agents,
    "long": _long,
    "tenants": _tenants,
    "diurnal": diurnal,
    "shift": shift,
}
