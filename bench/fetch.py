"""How many prompt tokens workers compute that fetch pages from each other, and that do not.

    python -m bench.fetch --json [--documents 30] [--times 6] [--spread 18]

2P + 2D of a tiny model in float32, policy round-robin. Each document is asked about several times, each time
with another question at its end, two requests at once. Documents come one after another, and the questions
about one are spread at random over the time in which `--spread` others come; with much more than there are
documents, the order is random. `ratios`:

    computed_third   prompt tokens that all workers compute with fetches / without, where the pool of each
                     worker holds a third of the documents
    computed_all     the same where each holds all documents

`values`: the tokens computed, what came of the fetches, and how many answers differ from transformers'.
"""

from __future__ import annotations

import random
import tempfile
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.common import argument_parser, print_result
from tests.harness.local_stack import Stack, stack
from tests.support.reference import draw_model

PAGE_SIZE = 16
DOCUMENT_TOKENS = 960
QUESTION_TOKENS = 24  # more than a decode worker computes itself
ANSWER_TOKENS = 8
AT_ONCE = 2
_SEED = 18


@dataclass
class Outcome:
    """What the workers of one stack did."""

    computed: int = 0  # tokens of prompts
    fetched: int = 0  # likewise
    fetches: Counter[str] = field(default_factory=Counter)  # by what came of them
    answers: list[list[int]] = field(default_factory=list)  # by prompt

    def plain(self, right: Sequence[list[int]]) -> dict[str, Any]:
        """For a result. `right` are the answers that should have come."""
        wrong = sum(answer != other for answer, other in zip(self.answers, right, strict=True))
        return {
            "computed": self.computed,
            "fetched": self.fetched,
            "fetches": dict(self.fetches),
            "wrong_answers": wrong,
        }


def prompts(documents: int, times: int, spread: float) -> list[list[int]]:
    """`times` questions about each document, in the order in which they are asked."""
    draw = random.Random(_SEED)

    def tokens(count: int) -> list[int]:
        return [draw.randrange(256) for _ in range(count)]

    texts = [tokens(DOCUMENT_TOKENS) for _ in range(documents)]
    asked = [
        (number + spread * draw.random(), text + tokens(QUESTION_TOKENS))
        for number, text in enumerate(texts)
        for _ in range(times)
    ]
    return [prompt for _, prompt in sorted(asked)]


def pool_tokens(documents: int) -> int:
    """The size of a pool that holds so many documents, and has room for one more request."""
    request = -(-(DOCUMENT_TOKENS + QUESTION_TOKENS + ANSWER_TOKENS) // PAGE_SIZE) * PAGE_SIZE
    return documents * DOCUMENT_TOKENS + request


def ask_all(
    model: Path, directory: Path, asked: Sequence[list[int]], held: int, fetch: bool, **options: Any
) -> Outcome:
    """Ask all prompts of a stack whose pools hold `held` documents each."""
    directory.mkdir(parents=True)
    router = {"policy": "round-robin", "peer_fetch": fetch}
    chosen = {
        "dtype": "float32",
        "threads": 1,
        "page_size": PAGE_SIZE,
        "chunked_prefill_size": 128,
        "max_total_tokens": pool_tokens(held),
        "max_running_requests": 4,
        **options,
    }
    with stack(model, directory, 2, 2, router=router, **chosen) as running:
        with ThreadPoolExecutor(AT_ONCE) as pool:
            answers = list(pool.map(lambda prompt: running.generate(prompt, ANSWER_TOKENS), asked))
        running.settle()
        return _outcome(running, [answer["output_ids"] for answer in answers])


def _outcome(running: Stack, answers: list[list[int]]) -> Outcome:
    found = Outcome(answers=answers)
    for worker in running.workers:
        metrics = running.inspect(worker, "metrics")
        found.computed += metrics["prefill_tokens"]
        found.fetched += metrics["fetched_tokens"]
        found.fetches.update(metrics["fetches"])
    return found


def main() -> None:
    """Measure, print."""
    parser = argument_parser(__doc__)
    parser.add_argument("--documents", type=int, default=30)
    parser.add_argument("--times", type=int, default=6, help="that each document is asked about")
    parser.add_argument("--spread", type=float, default=18.0, help="of the questions about one, in documents")
    given = parser.parse_args()
    asked = prompts(given.documents, given.times, given.spread)
    ratios: dict[str, float] = {}
    values: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(prefix="bf-", dir="/tmp") as made:
        scratch = Path(made)
        model, right = draw_model("qwen3", scratch / "models", _SEED, asked, ANSWER_TOKENS)
        for name, held in (("third", given.documents // 3), ("all", given.documents)):
            outcomes = {
                side: ask_all(model, scratch / f"{name}-{side}", asked, held, side == "fetch")
                for side in ("fetch", "apart")
            }
            ratios[f"computed_{name}"] = round(outcomes["fetch"].computed / outcomes["apart"].computed, 3)
            values[name] = {side: outcome.plain(right) for side, outcome in outcomes.items()}
    print_result("fetch", ratios, values, given.json)


if __name__ == "__main__":
    main()
