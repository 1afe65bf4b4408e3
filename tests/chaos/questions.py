"""Questions: the requests of a run with the answers of an undisturbed stack, which are checked once."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass

from engine.fake import fake_generate
from tests.chaos.asked import Answer, Asked, draw, with_stop
from tests.chaos.client import Client
from tests.chaos.stack import ChaosStack
from tests.support.reference import reference_generate
from tests.support.tiny_configs import VOCAB_SIZE

TOKENS = 60
_SHORT, _LONG = (100, 150), (260, 300)
_UNDISTURBED_S = 60.0


@dataclass(frozen=True)
class Question:
    """A request and its only right answer."""

    asked: Asked
    answer: Answer


@dataclass(frozen=True)
class Questions:
    """Requests of all kinds. Those with long prompts do not all fit into the decode workers' memory."""

    short: list[Question]
    long: list[Question]


def learn(stack: ChaosStack, engine: str, seed: int) -> Questions:
    """Ask everything of a stack without faults. Raises AssertionError when an answer is wrong."""
    found = []
    for number, (bounds, count, tokens) in enumerate(((_SHORT, 10, TOKENS), (_LONG, 10, 20))):
        asked = draw(seed + number, count, bounds, tokens)
        first = ask_all(stack, asked, f"learn{number}a")
        for one, answer in zip(asked, first, strict=True):
            check(stack, engine, one, answer)
        stopped = [
            with_stop(one, answer) if one.kind == "stop string" else one
            for one, answer in zip(asked, first, strict=True)
        ]
        answers = ask_all(stack, stopped, f"learn{number}b")
        found.append([Question(*pair) for pair in zip(stopped, answers, strict=True)])
    return Questions(*found)


def check(stack: ChaosStack, engine: str, asked: Asked, answer: Answer) -> None:
    """Compare an answer with the reference, where there is one: greedy tokens; all of the fake engine's."""
    for index, choice in answer.items():
        if not choice.tokens:
            continue  # this API tells texts only
        if engine == "fake":
            wanted = fake_generate(asked.prompt, asked.tokens, VOCAB_SIZE)
        elif asked.sampling["temperature"] == 0.0:
            wanted, _ = reference_generate(stack.options.model, asked.prompt, asked.tokens)
        else:
            continue
        assert choice.tokens == wanted, f"choice {index} of {asked.kind} is wrong without any fault"


def ask_all(stack: ChaosStack, asked: list[Asked], salt: str) -> list[Answer]:
    """The answers, asked all at once."""
    clients = [Client(one, f"{salt}-{i}", salt, stack.routers) for i, one in enumerate(asked)]
    run_all(clients, _UNDISTURBED_S, _UNDISTURBED_S)
    problems = [client.streamed.problem for client in clients if not client.streamed.complete]
    assert not problems, problems
    return [client.streamed.answer for client in clients]


def start_all(clients: list[Client], bound_s: float, patience_s: float) -> list[threading.Thread]:
    """Run the clients, each on a thread."""
    deadline = time.monotonic() + bound_s
    threads = [
        threading.Thread(target=client.run, args=(deadline, patience_s), name=client.streamed.request_id)
        for client in clients
    ]
    for thread in threads:
        thread.start()
    return threads


def run_all(clients: list[Client], bound_s: float, patience_s: float) -> None:
    """Run the clients and wait for all of them."""
    for thread in start_all(clients, bound_s, patience_s):
        thread.join()
