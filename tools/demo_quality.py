"""Asks the served demo model about functions in words it was not trained on, and counts the right answers.

    python -m tools.demo_quality --serve                        prefill and decode workers of its own
    python -m tools.demo_quality --url http://127.0.0.1:8000    a server that runs already

50 of all trained functions are drawn by a fixed seed and each is asked in three held-out phrasings, greedy.
An answer is right when its first sentence is the one frozen in `quality.json` when the model was trained. A
function counts when it is right in the phrasing that was drawn for it. Exit code 1 when fewer than 40 count,
or when fewer than 40 are right in any one phrasing; 2 when the check cannot be made. With --url it needs the
standard library only.
"""

from __future__ import annotations

import http.client
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from common.arguments import ExactParser
from tools.demo_text import check_held_out, draw_functions, first_sentence

SEED = 4711
DRAWN = 50
WANTED = 40
MAX_TOKENS = 128
QUALITY = Path(__file__).parent.parent / "deploy" / "demo_model" / "quality.json"


class CheckError(Exception):
    """The check could not be made: the server or the frozen expectations are wrong, not the answers."""


@dataclass(frozen=True)
class Expectations:
    """What training froze: first sentence by function name, and both kinds of phrasing."""

    sentences: dict[str, str]
    training: tuple[str, ...]
    held_out: tuple[str, ...]


@dataclass(frozen=True)
class Score:
    """Right answers: per held-out phrasing over all drawn functions, and over the phrasing drawn for each."""

    drawn: int
    per_phrasing: tuple[int, ...]
    counted: int

    @property
    def enough(self) -> bool:
        return min(self.counted, *self.per_phrasing) >= WANTED


def load_expectations(path: Path) -> Expectations:
    """Read `quality.json`.

    Raises CheckError when it is unusable, or when a held-out phrasing occurs in training.
    """
    try:
        frozen = json.loads(path.read_text())
        expectations = Expectations(
            dict(frozen["functions"]),
            tuple(frozen["training_phrasings"]),
            tuple(frozen["held_out_phrasings"]),
        )
        check_held_out(expectations.training, expectations.held_out)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckError(f"{path}: {error}") from error
    if len(expectations.sentences) < DRAWN:
        raise CheckError(f"{path}: {len(expectations.sentences)} functions, fewer than the {DRAWN} to draw")
    return expectations


class ChatClient:
    """Greedy single-turn chats with one OpenAI-compatible server; a connection for each request."""

    def __init__(self, url: str, timeout_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme != "http" or not parts.hostname:
            raise CheckError(f"--url {url}: want http://HOST:PORT")
        self._host, self._port = parts.hostname, parts.port or 80
        self._timeout_s = timeout_s
        self.model = str(self._call("GET", "/v1/models")["data"][0]["id"])

    def ask(self, question: str) -> str:
        """The answer to one question. Raises CheckError when the server does not give one."""
        body = {
            "model": self.model,
            "messages": [{"role": "user", "content": question}],
            "temperature": 0,
            "max_tokens": MAX_TOKENS,
        }
        return str(self._call("POST", "/v1/chat/completions", body)["choices"][0]["message"]["content"])

    def _call(self, method: str, path: str, body: object | None = None) -> dict[str, Any]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout_s)
        payload = None if body is None else json.dumps(body)
        try:
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            text = reply.read()
        except (OSError, http.client.HTTPException) as error:
            raise CheckError(f"{method} http://{self._host}:{self._port}{path}: {error}") from error
        finally:
            connection.close()
        if reply.status != http.client.OK:
            raise CheckError(f"{method} {path}: HTTP {reply.status} {text[:300]!r}")
        decoded: dict[str, Any] = json.loads(text)
        return decoded


def score(expectations: Expectations, client: ChatClient, concurrency: int) -> Score:
    """Ask every drawn function in every held-out phrasing; wrong answers are printed."""
    names = draw_functions(expectations.sentences, SEED, DRAWN)
    phrasings = expectations.held_out
    asked = [(name, phrasing) for name in names for phrasing in phrasings]
    with ThreadPoolExecutor(concurrency) as pool:
        answers = list(pool.map(lambda pair: client.ask(pair[1].format(name=pair[0])), asked))
    right = [
        _is_right(expectations.sentences[name], phrasing.format(name=name), answer)
        for (name, phrasing), answer in zip(asked, answers, strict=True)
    ]
    rows = [right[start : start + len(phrasings)] for start in range(0, len(right), len(phrasings))]
    chance = random.Random(SEED)
    return Score(
        drawn=len(names),
        per_phrasing=tuple(sum(column) for column in zip(*rows, strict=True)),
        counted=sum(chance.choice(row) for row in rows),
    )


def _is_right(want: str, question: str, answer: str) -> bool:
    have = first_sentence(answer)
    if have != want:
        print(f"wrong: {question}\n  want: {want}\n  have: {have}")
    return have == want


@contextmanager
def served(model: Path) -> Iterator[str]:
    """The URL of a router with one prefill and one decode worker for `model`, ended at the end."""
    # Imported here: a check of a running server needs none of the stack's dependencies.
    from tests.harness.local_stack import stack

    with tempfile.TemporaryDirectory() as directory, stack(model, Path(directory)) as running:
        yield str(running.router.ready["http"])


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = ExactParser(description="Counts the served demo model's right answers.")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="where the model is served: http://HOST:PORT")
    where.add_argument("--serve", action="store_true", help="serve the demo model for the check")
    parser.add_argument("--quality", type=Path, default=QUALITY, help="the frozen expectations")
    parser.add_argument("--concurrency", type=int, default=4, help="requests at a time")
    parser.add_argument("--timeout", type=float, default=120.0, help="seconds to wait for one answer")
    options = parser.parse_args(arguments)
    try:
        expectations = load_expectations(options.quality)
        with served(options.quality.parent) if options.serve else nullcontext(options.url) as url:
            result = score(expectations, ChatClient(url, options.timeout), options.concurrency)
    except CheckError as error:
        print(f"demo quality: {error}", file=sys.stderr)
        return 2
    for phrasing, right in zip(expectations.held_out, result.per_phrasing, strict=True):
        print(f"{right} of {result.drawn}: {phrasing}")
    verdict = "ok" if result.enough else "short"
    lowest = min(result.per_phrasing)
    print(
        f"demo quality {verdict}: {result.counted} of {result.drawn} in the phrasing drawn for each"
        f" (lowest phrasing {lowest}, want {WANTED}; {len(expectations.sentences)} functions trained)"
    )
    return 0 if result.enough else 1


if __name__ == "__main__":
    sys.exit(main())
