"""`make kv-quant`: what storing KV in fewer bits costs the demo model, for each `kv_cache_dtype`.

Perplexity, teacher-forced through the paged path as it is served (chunks, and one token at a time), of

    answers      the sentences that the model was trained to say, after one of the trained phrasings
    docstrings   whole docstrings of modules held out from training (tools/kv_quant_text.py)

and `make demo-quality` over a stack whose prefill and decode workers store their KV in that format. Then the
perplexities with int8 weights (`weight_dtype`) and KV in the model's dtype, where this CPU has them. Exit
code 1 when fp8_e4m3 changes either perplexity by more than 1 % or loses more than 2 of the 50 answers; 2
when the measurement fails.
"""

from __future__ import annotations

import math
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedTokenizerFast

from common.arguments import ExactParser
from common.errors import ConfigError
from engine.batch import ForwardBatch, SamplingRows
from engine.config import EngineConfig
from engine.loader import load_model
from engine.runner import ModelRunner
from kvcache.layout import KVGroupSpec
from kvcache.pool import MHAKVCache
from kvcache.quant import KVFormat
from tools.demo_quality import QUALITY, ChatClient, CheckError, load_expectations, score
from tools.kv_quant_text import held_out_docstrings

MODEL = QUALITY.parent
PAGE_SIZE = 16
CHUNK = 64
LANES = 16
EVERY = 3
"""Every so many-th of the held-out docstrings is taken: about 30,000 tokens."""
ONE_AT_A_TIME = 2_000
"""Docstring tokens, at least, that go through the decode path."""
MOST_COST = 0.01
MOST_LOST = 2
QUESTIONS_AT_A_TIME = 4
TIMEOUT_S = 120.0


@dataclass(frozen=True)
class Text:
    """A question and what follows it; the tokens from `first` on count."""

    ids: list[int]
    first: int

    @property
    def counted(self) -> int:
        return len(self.ids) - self.first


@dataclass
class Loss:
    """Nats over tokens."""

    nats: float = 0.0
    tokens: int = 0

    def __add__(self, other: Loss) -> Loss:
        return Loss(self.nats + other.nats, self.tokens + other.tokens)

    @property
    def perplexity(self) -> float:
        return math.exp(self.nats / self.tokens)


@dataclass
class Measured:
    """One format."""

    answers: Loss
    chunked: Loss  # docstrings
    stepped: Loss  # docstrings, one token at a time
    bytes_per_token: float
    right: int = 0  # of 50 questions
    asked: int = 0

    @property
    def docstrings(self) -> Loss:
        return self.chunked + self.stepped

    @property
    def tokens_per_gib(self) -> int:
        return int((1 << 30) / self.bytes_per_token)

    def cost(self, auto: Measured) -> float:
        """The share by which a perplexity differs from `auto`'s, of the two the one that differs more."""
        pairs = ((self.answers, auto.answers), (self.docstrings, auto.docstrings))
        return max((mine.perplexity / its.perplexity - 1 for mine, its in pairs), key=abs)

    def __str__(self) -> str:
        return f"{self.answers.perplexity:.4f}/{self.docstrings.perplexity:.2f}/{self.right}"


class PagedScorer:
    """Teacher-forced losses of a model over a pool stored as `form`."""

    def __init__(self, model: Path, form: KVFormat, longest: int, weight_dtype: str = "auto") -> None:
        """`longest`: tokens of the longest text."""
        config = EngineConfig(str(model), weight_dtype=weight_dtype, kv_cache_dtype=form, overlap=False)
        loaded = load_model(config)
        spec = loaded.spec.groups[0]
        assert isinstance(spec, KVGroupSpec), "the demo model attends fully"
        self._row_pages = -(-longest // PAGE_SIZE)
        self._pool = MHAKVCache(spec, LANES * self._row_pages, PAGE_SIZE)
        self._runner = ModelRunner(loaded, {spec.name: self._pool}, config)
        self._pages = np.random.default_rng(0).permutation(self._pool.num_pages).astype(np.int32) + 1

    @property
    def bytes_per_token(self) -> float:
        return self._pool.page_bytes / PAGE_SIZE

    def close(self) -> None:
        self._runner.close()

    def loss(self, texts: Sequence[Text], stepped: bool = False) -> Loss:
        """Of all counted tokens. `stepped`: each of them is computed alone, as decode does."""
        total = Loss()
        for start in range(0, len(texts), LANES):
            lanes = list(enumerate(texts[start : start + LANES]))
            done = dict.fromkeys(range(LANES), 0)
            while work := [
                (i, t, self._next(t, done[i], stepped)) for i, t in lanes if done[i] < len(t.ids) - 1
            ]:
                total += self._step(work, done)
                for i, _, new in work:
                    done[i] += new
        return total

    @staticmethod
    def _next(text: Text, done: int, stepped: bool) -> int:
        """New tokens of a text in the next forward; the last token is only predicted."""
        if not stepped:
            return min(CHUNK, len(text.ids) - 1 - done)
        return 1 if done >= text.first - 1 else min(CHUNK, text.first - 1 - done)

    def _step(self, work: Sequence[tuple[int, Text, int]], done: dict[int, int]) -> Loss:
        """One forward over `new` tokens of each (lane, text, new)."""
        ids, positions, slots = [], [], []
        places: list[int] = []  # of the pack: whose next token counts
        wanted: list[int] = []  # and which token that is
        table = np.stack([self._pages[i * self._row_pages :][: self._row_pages] for i, _, _ in work])
        packed = 0
        for row, (i, text, new) in enumerate(work):
            at = np.arange(done[i], done[i] + new)
            ids.extend(text.ids[done[i] : done[i] + new])
            positions.append(at)
            slots.append(table[row, at // PAGE_SIZE].astype(np.int64) * PAGE_SIZE + at % PAGE_SIZE)
            counted = at[at + 1 >= text.first]
            places.extend((packed + counted - done[i]).tolist())
            wanted.extend(text.ids[p + 1] for p in counted.tolist())
            packed += new
        q_lens = np.array([new for _, _, new in work], dtype=np.int32)
        batch = ForwardBatch(
            input_ids=np.array(ids, dtype=np.int64),
            positions=np.concatenate(positions).astype(np.int64),
            out_slots=np.concatenate(slots),
            rows=np.array([i + 1 for i, _, _ in work], dtype=np.int32),
            q_lens=q_lens,
            seq_lens=np.array([done[i] for i, _, _ in work], dtype=np.int32) + q_lens,
            page_table=table,
            sampled=np.zeros(0, dtype=np.int32),
            sampling=SamplingRows((), np.zeros(0, dtype=np.int64)),
        )
        if not wanted:
            places = [0]
        with torch.inference_mode():
            logits = self._runner.logits(batch, np.array(places)).float()[: len(wanted)]
            nats = torch.nn.functional.cross_entropy(
                logits.double(), torch.tensor(wanted).long(), reduction="sum"
            )
        return Loss(float(nats), len(wanted))


def texts_of(tokenizer: PreTrainedTokenizerFast, pairs: Sequence[tuple[str, str]]) -> list[Text]:
    """(question, answer) pairs as the model saw conversations; the answers' tokens count."""
    texts = []
    for question, answer in pairs:
        head = tokenizer.apply_chat_template(
            [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
        )
        prompt = tokenizer.encode(head)
        texts.append(Text([*prompt, *tokenizer.encode(answer)], len(prompt)))
    return texts


def measure(
    form: KVFormat, answers: Sequence[Text], docstrings: Sequence[Text], weight_dtype: str = "auto"
) -> Measured:
    """Perplexities of one format."""
    longest = max(len(text.ids) for text in (*answers, *docstrings))
    scorer = PagedScorer(MODEL, form, longest, weight_dtype)
    cut, tokens = 0, 0
    while tokens < ONE_AT_A_TIME:
        tokens += docstrings[cut].counted
        cut += 1
    try:
        return Measured(
            answers=scorer.loss(answers),
            chunked=scorer.loss(docstrings[cut:]),
            stepped=scorer.loss(docstrings[:cut], stepped=True),
            bytes_per_token=scorer.bytes_per_token,
        )
    finally:
        scorer.close()


def perplexities(result: Measured) -> str:
    """Of answers and docstrings."""
    return (
        f"perplexity: answers {result.answers.perplexity:.5f}, docstrings {result.docstrings.perplexity:.3f}"
        f" (chunks {result.chunked.perplexity:.3f} of {result.chunked.tokens} tokens,"
        f" one at a time {result.stepped.perplexity:.3f} of {result.stepped.tokens})"
    )


def ask(form: KVFormat, measured: Measured) -> None:
    """Ask the 50 questions of `make demo-quality`, over workers that store their KV in this format."""
    # Imported here: it needs the whole stack.
    from tests.harness.local_stack import stack

    expectations = load_expectations(QUALITY)
    with (
        tempfile.TemporaryDirectory() as directory,
        stack(MODEL, Path(directory), kv_cache_dtype=form) as running,
    ):
        result = score(expectations, ChatClient(running.url, TIMEOUT_S), QUESTIONS_AT_A_TIME)
    measured.right, measured.asked = result.counted, result.drawn


def verdict(results: dict[KVFormat, Measured]) -> tuple[int, str]:
    """The exit code and the last line."""
    auto, e4m3 = results[KVFormat.AUTO], results[KVFormat.FP8_E4M3]
    cost = e4m3.cost(auto)
    good = abs(cost) <= MOST_COST and auto.right - e4m3.right <= MOST_LOST
    short = {form: form.value.rpartition("_")[2] if "_" in form else form.value for form in results}
    short[KVFormat.FP4_E2M1] = "fp4"
    shown = " ".join(
        f"{short[form]}={result}" + (f"({cost:+.2%})" if form is KVFormat.FP8_E4M3 else "")
        for form, result in results.items()
    )
    room = " ".join(f"{short[form]}={result.tokens_per_gib}" for form, result in results.items())
    return (0 if good else 1), f"kv-quant: {shown} | tokens/GiB {room}"


def main(arguments: Sequence[str] | None = None) -> int:
    """The command; returns its exit code."""
    parser = ExactParser(description="What quantised KV costs the demo model.")
    parser.add_argument("--no-quality", action="store_true", help="perplexities only; ask nothing")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    tokenizer = PreTrainedTokenizerFast.from_pretrained(MODEL)
    try:
        expectations = load_expectations(QUALITY)
        phrasings = expectations.training
        trained = enumerate(sorted(expectations.sentences.items()))
        answers = texts_of(
            tokenizer,
            [(phrasings[i % len(phrasings)].format(name=name), text) for i, (name, text) in trained],
        )
        docstrings = texts_of(
            tokenizer, [(f"What does {d.name} do?", d.text) for d in held_out_docstrings()[::EVERY]]
        )
        print(
            f"{sum(t.counted for t in answers)} tokens of {len(answers)} trained answers,"
            f" {sum(t.counted for t in docstrings)} of {len(docstrings)} docstrings held out from training"
        )
        results: dict[KVFormat, Measured] = {}
        for form in KVFormat:
            results[form] = result = measure(form, answers, docstrings)
            if not options.no_quality:
                ask(form, result)
            asked = f"; right {result.right} of {result.asked}; {result.bytes_per_token:g} bytes a token"
            print(f"{form:9s} {perplexities(result)}{asked}", flush=True)
        with suppress(ConfigError):  # no AVX2, or a model that is not in bfloat16
            rounded = measure(KVFormat.AUTO, answers, docstrings, "int8")
            cost = rounded.cost(results[KVFormat.AUTO])
            print(f"int8 weights {perplexities(rounded)}; {cost:+.2%} at most", flush=True)
    except CheckError as error:
        print(f"kv-quant: {error}", file=sys.stderr)
        return 2
    code, line = verdict(results)
    print(line)
    return code


if __name__ == "__main__":
    sys.exit(main())
