"""What end-to-end tests ask of a stack beyond `Stack.generate`: whole bodies, timelines, one choice alone."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

from tests.harness.local_stack import Stack
from wire.codec import pack_tokens
from wire.messages.rooms import Ack, Decode, Tokens
from wire.request import GenerateRequest, SamplingParams, TokenLogprobs

_ANSWER_S = 60.0
_TRACE_S = 20.0


def ask(
    running: Stack,
    prompt: list[int],
    sampling: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
    **body: Any,
) -> Any:
    """The answer of POST /generate; `body` are its other fields."""
    whole = {"input_ids": prompt, "sampling_params": dict(sampling), **body}
    answer = running.http.post("/generate", json=whole, headers=dict(headers or {}))
    assert answer.status_code == 200, answer.text
    return answer.json()


def timeline(running: Stack, request_id: str, lanes: int) -> dict[str, Any]:
    """A request's trace once it has `lanes` processes: `stages` of each, [(stage, ns)] in the order shown.

    The workers' halves come after the answer. `about` is the trace's summary.
    """
    deadline = time.monotonic() + _TRACE_S
    while True:
        trace = running.admin.get(f"/debug/trace/{request_id}").raise_for_status().json()
        names = {e["pid"]: e["args"]["name"] for e in trace["traceEvents"] if e["ph"] == "M"}
        if len(names) == lanes:
            break
        assert time.monotonic() < deadline, f"{names} is all that came"
    stages: dict[str, list[tuple[str, int]]] = {name: [] for name in names.values()}
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            stages[names[event["pid"]]].append((event["name"], event["args"]["at_ns"]))
    return {"about": trace["otherData"], "stages": stages}


def one_choice(
    running: Stack, worker: int, prompt: Sequence[int], sampling: SamplingParams, choice: int
) -> tuple[list[int], list[TokenLogprobs]]:
    """Tokens and log-probabilities of choice number `choice`, asked alone.

    HTTP has no way to ask for the third choice without the first two, so this speaks to the decode worker
    as a router does.
    """
    address = running.decode[worker].ready["mailbox"]
    room = 2**61 + choice
    request = GenerateRequest(
        request_id=f"choice-{choice}", room=room, epoch=0, prompt=pack_tokens(list(prompt)),
        sampling=sampling, choice=choice,
    )  # fmt: skip
    running.mailbox.send(address, Decode(request))
    tokens: list[int] = []
    logprobs: list[TokenLogprobs] = []
    deadline = time.monotonic() + _ANSWER_S
    while time.monotonic() < deadline:
        for mail in running.mailbox.wait(1.0):
            runs = mail.message.runs if isinstance(mail.message, Tokens) else []
            for run in runs:
                assert (run.room, run.start) == (room, len(tokens))
                tokens += run.tokens
                logprobs += run.logprobs or []
                if run.finish is not None:
                    running.mailbox.send(address, Ack([(room, 0, len(tokens))]))
                    return tokens, logprobs
    raise AssertionError(f"the worker did not finish; it said {tokens}")
