"""Requests to the ingress of a host, and the answers that `transformers.generate` gives to them."""

from __future__ import annotations

import functools
import json
import random
import re
import uuid
from pathlib import Path
from typing import Any

import httpx
from transformers import AutoTokenizer
from transformers.utils import logging as transformers_logging

from common.host import HTTP_PORT
from tests.cluster_hosts.readme import ROOT
from tests.support.reference import MIN_MARGIN, reference_generate

transformers_logging.disable_progress_bar()
MODEL = ROOT / "deploy" / "demo_model"
_QUESTIONS = ("What does os.path.join do?", "What does sorted do?", "What does json.loads do?")
_CHAT_TOKENS = 80  # more than these answers have
_END = 2  # the model's token
_ANSWER_S = 120.0


def chat(address: str) -> int:
    """Ask the questions there. Returns how many: every answer is right to its end, or AssertionError."""
    for question in _QUESTIONS:
        messages = [{"role": "user", "content": question}]
        body = {"model": MODEL.name, "messages": messages, "max_tokens": _CHAT_TOKENS, "temperature": 0}
        found = _post(address, "/v1/chat/completions", body)["choices"][0]["message"]["content"]
        assert found == _reference_chat(question), f"{question} at {address}: {found!r}"
    return len(_QUESTIONS)


def content(answer: str) -> str:
    """What a chat that was printed as server-sent events says."""
    pieces = []
    for line in re.findall(r"^data: (\{.*\})\s*$", answer, re.MULTILINE):
        pieces += [one["delta"].get("content") or "" for one in json.loads(line)["choices"]]
    return "".join(pieces)


def generate(address: str, prompt: list[int], count: int) -> str:
    """Ask for `count` tokens there. Returns the request's id; every token is right, or AssertionError."""
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": count}
    name = str(uuid.uuid4())
    found = _post(address, "/generate", {"input_ids": prompt, "sampling_params": sampling}, name)
    assert found["output_ids"] == reference(tuple(prompt), count), f"wrong tokens at {address}"
    return name


def prompts(seed: int, number: int, length: int, count: int) -> list[list[int]]:
    """Drawn prompts whose `count` next tokens do not depend on the order of a sum."""
    rng = random.Random(seed)
    found: list[list[int]] = []
    while len(found) < number:
        prompt = [rng.randrange(3, 4096) for _ in range(length)]
        if _generated(tuple(prompt), count)[1] > MIN_MARGIN:
            found.append(prompt)
    return found


def reference(prompt: tuple[int, ...], count: int) -> list[int]:
    """The tokens that follow, in float32."""
    return _generated(prompt, count)[0]


def _generated(prompt: tuple[int, ...], count: int) -> tuple[list[int], float]:
    return reference_generate(MODEL, prompt, count)


@functools.cache
def _reference_chat(question: str) -> str:
    tokenizer = AutoTokenizer.from_pretrained(Path(MODEL))
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    tokens = reference(tuple(prompt), _CHAT_TOKENS)
    return str(tokenizer.decode(tokens[: tokens.index(_END)]))


def _post(address: str, path: str, body: dict[str, object], request_id: str = "") -> Any:
    headers = {"X-Request-Id": request_id} if request_id else {}
    url = f"http://{address}:{HTTP_PORT}{path}"
    answer = httpx.post(url, json=body, headers=headers, timeout=_ANSWER_S)
    return answer.raise_for_status().json()
