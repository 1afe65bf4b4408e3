"""Cases: a fault of the network, streams that run when it begins, and streams that begin in it."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from engine.fake import fake_generate
from tests.harness.local_stack import Stack, wait_for_workers
from tests.harness.processes import Child
from tests.hosts.network import Network
from tests.support.members import curve_of, write_secret
from wire.mailbox import Mailbox

_TOKENS = 300  # of an answer: some seconds
_STREAMS = 4  # before the fault, and again in it
_ANSWER_S = 240.0
_WORKER: dict[str, Any] = {
    "engine": "fake",
    "fake_step_s": 0.02,
    "max_total_tokens": 16_384,
    "chunked_prefill_size": 64,
}
_ROUTER: dict[str, Any] = {"prefill_on_decode_tokens": 0, "max_queued": 0}
HOSTS = ("router", "prefill", "decode")
PAIRS = (("router", "prefill"), ("router", "decode"), ("prefill", "decode"))


@dataclass(frozen=True)
class Case:
    """`begin` makes the fault; it ends after `seconds`, or with the last answer."""

    name: str
    begin: Callable[[Network], None]
    seconds: float | None = None
    delay_s: float = 0.0  # of every connection, from the start of the processes on


@dataclass(frozen=True)
class Outcome:
    """Answers that were not right, and those that did not come."""

    wrong_token: int = 0
    lost: int = 0


def _partition(one: str, other: str, seconds: float) -> Case:
    return Case(f"{one}-{other} parted for {seconds:.0f} s", lambda net: net.part(one, other), seconds)


SHORT = [
    Case("no fault", lambda net: None),
    Case("5% of packets lost", lambda net: net.lose(0.05)),
    *(_partition(*pair, 5.0) for pair in PAIRS),
]
DELAYED = [Case("50 ms of delay", lambda net: None, delay_s=0.05)]
LONG = [_partition(*pair, 60.0) for pair in PAIRS]


def run_cases(cases: Sequence[Case], backend: str, model: Path, directory: Path) -> list[Outcome]:
    """One after the other on three hosts, with the first one's delay. One that raises loses its streams."""
    outcomes = []
    with ExitStack() as cleanup:
        net = cleanup.enter_context(Network(HOSTS))
        if cases[0].delay_s:
            net.delay(cases[0].delay_s)
        cleanup.enter_context(net.on("router"))
        running = cleanup.enter_context(_stack(net, backend, model, directory))
        for case in cases:
            began = time.monotonic()
            try:
                outcome, note = _run(case, net, running), ""
                running.settle()
            except Exception as error:  # noqa: BLE001  the other cases still run
                outcome, note = Outcome(lost=2 * _STREAMS), f": {error}"
            seconds = time.monotonic() - began
            sys.stdout.write(f"{backend}: {case.name}: {outcome} in {seconds:.0f} s{note}\n")
            sys.stdout.flush()
            outcomes.append(outcome)
    return outcomes


@contextmanager
def _stack(net: Network, backend: str, model: Path, directory: Path) -> Iterator[Stack]:
    """Router, prefill and decode, each on its host; the directory beside the router, where the caller is."""
    directory.mkdir()
    secret = write_secret(directory)

    def options(host: str, **more: Any) -> dict[str, Any]:
        return {"cluster_secret_file": str(secret), "interface": net.address(host), **more}

    with ExitStack() as cleanup:
        leases = cleanup.enter_context(Child("router.directory", options("router"), directory))
        model_of = {
            "model": str(model),
            "served_model_name": "m",
            "directory": leases.wait_ready()["mailbox"],
        }
        front = cleanup.enter_context(
            Child("router", options("router", port=0, admin_ports="0", **model_of, **_ROUTER), directory)
        )
        front.wait_ready()
        workers = []
        for host in ("prefill", "decode"):
            wanted = options(host, kv_transfer_backend=backend, **model_of, **_WORKER)
            with net.on(host):
                workers.append(cleanup.enter_context(Child(f"{host}_node", wanted, directory)))
        for worker in workers:
            worker.wait_ready()
        http = cleanup.enter_context(httpx.Client(base_url=front.ready["http"], timeout=_ANSWER_S))
        admin = cleanup.enter_context(httpx.Client(base_url=front.ready["admin"], timeout=_ANSWER_S))
        mailbox = cleanup.enter_context(Mailbox(net.address("router"), curve_of()))
        running = Stack(leases, front, workers[:1], workers[1:], http, admin, mailbox)
        wait_for_workers(running, 2)
        yield running
        for worker in running.workers:
            worker.ask_to_end()


def _run(case: Case, net: Network, running: Stack) -> Outcome:
    rng = random.Random(case.name)
    prompts = [[rng.randrange(256) for _ in range(rng.randrange(20, 200))] for _ in range(2 * _STREAMS)]
    with ThreadPoolExecutor(len(prompts)) as pool:
        asked = [pool.submit(running.generate, prompt, _TOKENS) for prompt in prompts[:_STREAMS]]
        _wait_until_decoding(running)
        case.begin(net)
        try:
            asked += [pool.submit(running.generate, prompt, _TOKENS) for prompt in prompts[_STREAMS:]]
            if case.seconds is not None:
                time.sleep(case.seconds)  # the fault itself takes this long
                net.heal()
            return _judge(asked, prompts)
        finally:
            net.heal()


def _wait_until_decoding(running: Stack) -> None:
    deadline = time.monotonic() + 60.0
    while running.inspect(running.decode[0], "load")["running_requests"] < _STREAMS:
        assert time.monotonic() < deadline, "the streams do not get to decode"


def _judge(asked: Sequence[Future[dict[str, Any]]], prompts: Sequence[list[int]]) -> Outcome:
    wrong = lost = 0
    for future, prompt in zip(asked, prompts, strict=True):
        try:
            output = future.result(_ANSWER_S)["output_ids"]
        except Exception as error:  # noqa: BLE001  an error instead of an answer, of whatever kind
            sys.stdout.write(f"lost: {error}\n")
            lost += 1
        else:
            wrong += output != fake_generate(prompt, _TOKENS)
    return Outcome(wrong, lost)
