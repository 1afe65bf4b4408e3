"""Masks of grammars: against a definition by text, forward and back, and against transformers.generate."""

from __future__ import annotations

import json
import random
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from transformers import LogitsProcessor, LogitsProcessorList

import engine.grammar as grammar_module
from bench.grammar_vocabulary import make_tokenizer
from engine.batch import SamplingRows
from engine.errors import NothingAllowed
from engine.grammar import GrammarCompiler, GrammarState, mask_words
from engine.sampler import Sampled, Sampler
from engine.sampling_state import SamplingState
from tests.support.driver import Driver, open_runner
from tests.support.reference import generate_with
from tests.support.tiny_configs import VOCAB_SIZE
from tests.support.tiny_models import make_tiny, write_tokenizer
from wire.grammars import matcher_grammar
from wire.request import Grammar, GrammarKind, SamplingParams

EOS = 258
CHOICES = ("tea", "test", "tested", "no")
CHOICE = Grammar(GrammarKind.LARK, "start: " + " | ".join(json.dumps(text) for text in CHOICES))
SCHEMA = Grammar(
    GrammarKind.JSON_SCHEMA,
    json.dumps({
        "type": "object",
        "properties": {
            "name": {"enum": ["ant", "bee"]},
            "legs": {"type": "integer", "minimum": 0, "maximum": 99},
        },
        "required": ["name", "legs"],
        "additionalProperties": False,
    }),
)  # fmt: skip
LETTERS = Grammar(GrammarKind.REGEX, "[a-z]{3,20}")


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarCompiler]:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    made = GrammarCompiler((path / "tokenizer.json").read_text, VOCAB_SIZE, [EOS])
    yield made
    made.close()


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The text of each token; of special ones a text that no grammar here allows."""
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    special = tokenizer.get_added_tokens_decoder()
    return ["\0" if token in special else tokenizer.decode([token]) for token in range(VOCAB_SIZE)]


def begun(compiler: GrammarCompiler, grammar: Grammar, **params: Any) -> GrammarState:
    state = compiler.begin(SamplingParams(grammar=grammar, **params))
    assert state is not None
    return state


def allowed(state: GrammarState, outputs: Sequence[int]) -> set[int]:
    row = np.zeros(mask_words(VOCAB_SIZE), dtype=np.int32)
    state.follow(outputs, len(outputs), None)
    state.fill(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert not bits[VOCAB_SIZE:].any()
    return set(np.flatnonzero(bits).tolist())


def walk(state: GrammarState, rng: random.Random, most: int = 40) -> list[int]:
    """Random outputs of a grammar, without the end-of-sequence token."""
    outputs: list[int] = []
    while len(outputs) < most:
        choice = rng.choice(sorted(allowed(state, outputs)))
        if choice == EOS:
            break
        outputs.append(choice)
    return outputs


def test_allowed_are_the_tokens_that_go_on_with_some_choice(
    compiler: GrammarCompiler, texts: list[str]
) -> None:
    rng = random.Random(3)
    for _ in range(30):
        state, outputs, written = begun(compiler, CHOICE), [], ""
        while True:
            expected = {
                token
                for token, text in enumerate(texts)
                if any(c.startswith(written + text) for c in CHOICES)
            }
            if written in CHOICES:
                expected.add(EOS)
            assert allowed(state, outputs) == expected
            token = rng.choice(sorted(expected))
            if token == EOS:
                break
            outputs.append(token)
            written += texts[token]


@pytest.mark.parametrize("grammar", [CHOICE, SCHEMA, LETTERS], ids=["choice", "schema", "letters"])
def test_a_state_that_goes_back_allows_what_a_new_one_does(
    compiler: GrammarCompiler, grammar: Grammar
) -> None:
    rng = random.Random(4)
    for _ in range(10):
        state = begun(compiler, grammar)
        outputs = walk(state, rng)
        for length in rng.sample(range(len(outputs) + 1), min(5, len(outputs) + 1)):
            seen = allowed(state, outputs[:length])
            assert seen == allowed(begun(compiler, grammar), outputs[:length])
        other = outputs[: len(outputs) // 2]  # and it may go on otherwise
        other.append(rng.choice(sorted(allowed(state, other) - {EOS} or {outputs[len(other)]})))
        assert allowed(state, other) == allowed(begun(compiler, grammar), other)


@pytest.mark.parametrize("vocab_size", [288, 310])
def test_tokens_of_the_tokenizer_alone_are_never_allowed(
    tmp_path: Path, texts: list[str], vocab_size: int
) -> None:
    """As Gemma 3's for images: the tokenizer needs a longer mask than the model, or as long a one."""
    write_tokenizer(tmp_path)
    compiler = GrammarCompiler((tmp_path / "tokenizer.json").read_text, vocab_size, [EOS])
    state = begun(compiler, LETTERS)
    row = np.zeros(mask_words(vocab_size), dtype=np.int32)
    state.follow([], 0, None)
    state.fill(row)
    found = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()
    letters = [token for token, text in enumerate(texts) if text.isalpha() and text.islower()]
    assert found == [token for token in letters if token < vocab_size] != letters
    compiler.close()


def test_every_walk_through_the_schema_ends_and_is_valid(compiler: GrammarCompiler, texts: list[str]) -> None:
    rng = random.Random(5)
    for _ in range(30):
        outputs = walk(begun(compiler, SCHEMA), rng, 200)
        value = json.loads("".join(texts[token] for token in outputs))
        assert value["name"] in ("ant", "bee")
        assert 0 <= value["legs"] <= 99


def tokens_of(texts: list[str], text: str) -> list[int]:
    return [texts.index(letter) for letter in text]


def test_an_end_is_withheld_while_the_grammar_can_go_on_and_no_longer(
    compiler: GrammarCompiler, texts: list[str]
) -> None:
    test, tested = tokens_of(texts, "test"), tokens_of(texts, "tested")
    assert EOS in allowed(begun(compiler, CHOICE), test)
    for params in ({"ignore_eos": True}, {"min_tokens": 50}):
        assert EOS not in allowed(begun(compiler, CHOICE, **params), test)
        assert allowed(begun(compiler, CHOICE, **params), tested) == {EOS}
    assert EOS in allowed(begun(compiler, CHOICE, min_tokens=4), test)


def test_a_stop_token_is_withheld_before_min_tokens(compiler: GrammarCompiler, texts: list[str]) -> None:
    a, e = texts.index("a"), texts.index("e")
    te = tokens_of(texts, "te")
    assert a not in allowed(begun(compiler, CHOICE, stop_token_ids=(a,), min_tokens=3), te)
    assert a in allowed(begun(compiler, CHOICE, stop_token_ids=(a,), min_tokens=2), te)
    only = begun(
        compiler, Grammar(GrammarKind.REGEX, "ab"), stop_token_ids=(e, texts.index("b")), min_tokens=9
    )
    with pytest.raises(NothingAllowed, match="after 1 tokens"):
        allowed(only, [a])


def test_a_tokenizer_that_cannot_be_read_is_read_again_for_the_next_request(tmp_path: Path) -> None:
    write_tokenizer(tmp_path)
    texts = deque([OSError("stale file handle"), OSError("stale file handle")])

    def read() -> str:
        if texts:
            raise texts.popleft()
        return (tmp_path / "tokenizer.json").read_text()

    compiler = GrammarCompiler(read, VOCAB_SIZE, [EOS])
    with pytest.raises(NothingAllowed, match="stale file handle"):
        allowed(begun(compiler, CHOICE), [])
    assert allowed(begun(compiler, CHOICE), [])
    compiler.close()


def test_what_holds_the_gil_does_not_run_at_a_lower_priority(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The whole process would wait for it while other processes take the cores."""
    write_tokenizer(tmp_path)
    begun: list[str] = []
    threads: list[str] = []

    def read() -> str:
        begun.append("load")
        return (tmp_path / "tokenizer.json").read_text()

    def text_of(grammar: Grammar) -> str:
        threads.append(threading.current_thread().name)
        return matcher_grammar(grammar)

    monkeypatch.setattr(grammar_module, "_step_back", lambda: begun.append("step back"))
    monkeypatch.setattr(grammar_module, "matcher_grammar", text_of)
    compiler = GrammarCompiler(read, VOCAB_SIZE, [EOS])
    row = np.zeros(mask_words(VOCAB_SIZE), dtype=np.int32)
    for pattern in ("a+", "b+"):
        state = compiler.begin(SamplingParams(grammar=Grammar(GrammarKind.REGEX, pattern)))
        assert state is not None
        state.follow([], 0, None)
        state.fill(row)
    compiler.close()
    assert begun == ["load", "step back"]
    assert threads == [threading.current_thread().name] * 2


def test_foreign_outputs_and_bad_grammars_are_refused(compiler: GrammarCompiler, texts: list[str]) -> None:
    with pytest.raises(NothingAllowed, match="does not allow this output"):
        allowed(begun(compiler, CHOICE), tokens_of(texts, "tz"))
    with pytest.raises(NothingAllowed, match="cannot be compiled"):
        allowed(begun(compiler, Grammar(GrammarKind.REGEX, "(a")), [])
    with pytest.raises(NothingAllowed, match="cannot be compiled"):
        allowed(begun(compiler, Grammar(GrammarKind.JSON_SCHEMA, "{")), [])
    without_end = GrammarCompiler(lambda: "{}", VOCAB_SIZE, [])
    with pytest.raises(NothingAllowed, match="end-of-sequence"):
        allowed(begun(without_end, CHOICE), [])
    without_end.close()
    unreadable = GrammarCompiler(lambda: "{}", VOCAB_SIZE, [EOS])
    with pytest.raises(NothingAllowed, match="tokenizer"):
        allowed(begun(unreadable, CHOICE), [])
    unreadable.close()


def test_a_grammar_that_grows_more_ambiguous_with_every_token_is_stopped() -> None:
    """Beyond the limit a mask would take seconds. Words make it so: each can be read in many ways."""
    vocab = 8192
    compiler = GrammarCompiler(make_tokenizer(vocab).to_str, vocab, [vocab - 1])
    state = begun(compiler, Grammar(GrammarKind.LARK, 'start: a\na: a a | "x" | "y" | /[a-z]/ | " "'))
    outputs: list[int] = []
    row = np.zeros(mask_words(vocab), dtype=np.int32)

    def go_on() -> None:
        state.follow(outputs, len(outputs), None)
        state.fill(row)
        may = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        outputs.append(int(may[len(may) // 2]))

    with pytest.raises(NothingAllowed, match="Too many items"):
        deque(iter(go_on, "never"), maxlen=0)
    compiler.close()


# -- in the sampler --------------------------------------------------------------------------------------


def state_of(compiler: GrammarCompiler, params: SamplingParams, outputs: Sequence[int] = ()) -> SamplingState:
    return SamplingState(params, np.array([1], np.int32), (EOS,), 0, list(outputs), compiler.begin(params))


def sampled(sampler: Sampler, logits: torch.Tensor, states: Sequence[SamplingState]) -> Sampled:
    positions = np.array([len(state.outputs) for state in states])
    rows = SamplingRows(tuple(states), positions)
    return sampler.sample(logits, rows, torch.from_numpy(positions)).wait()


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": 5},
        {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.0, "logit_bias": {EOS: 100.0}, "repetition_penalty": 1.3, "presence_penalty": 1.0},
    ],
    ids=["greedy", "drawn", "truncated", "biased"],
)
def test_rows_follow_their_grammars_and_other_rows_are_as_alone(
    compiler: GrammarCompiler, texts: list[str], params: dict[str, Any]
) -> None:
    """Whatever the logits say, and beside rows of every kind."""
    random_logits = torch.Generator().manual_seed(1)
    constrained = [SamplingParams(grammar=grammar, **params) for grammar in (CHOICE, LETTERS, SCHEMA, CHOICE)]
    free = [
        SamplingParams(**params),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0, seed=9),
    ]
    states = [state_of(compiler, each) for each in (*constrained, *free)]
    alone = [state_of(compiler, each) for each in free]
    sampler, single = Sampler(VOCAB_SIZE, torch.device("cpu")), Sampler(VOCAB_SIZE, torch.device("cpu"))
    for _ in range(12):
        logits = torch.randn(len(states), VOCAB_SIZE, generator=random_logits) * 4
        may = [
            allowed(state.grammar, state.outputs) if state.grammar is not None else set(range(VOCAB_SIZE))
            for state in states
        ]
        result = sampled(sampler, logits, states)
        of_free = sampled(single, logits[-len(alone) :], alone)
        assert not result.failures
        assert not result.refusals
        assert result.tokens[-len(alone) :].tolist() == of_free.tokens.tolist()
        for state, token, tokens in zip(states, result.tokens.tolist(), may, strict=True):
            assert token in tokens
            state.outputs.append(token)
        for state, token in zip(alone, of_free.tokens.tolist(), strict=True):
            state.outputs.append(token)
        states = [state for state in states if state.grammar is None or state.outputs[-1] != EOS]


def test_a_row_without_a_token_is_refused_alone(compiler: GrammarCompiler) -> None:
    good, bad = SamplingParams(temperature=0.0, grammar=LETTERS), SamplingParams(grammar=CHOICE)
    states = [state_of(compiler, good), state_of(compiler, bad, [5]), state_of(compiler, SamplingParams())]
    result = sampled(Sampler(VOCAB_SIZE, torch.device("cpu")), torch.randn(3, VOCAB_SIZE), states)
    assert list(result.refusals) == [1]
    assert "does not allow" in result.refusals[1]
    assert not result.failures


def test_logprobs_are_those_of_the_model(compiler: GrammarCompiler) -> None:
    logits = torch.randn(1, VOCAB_SIZE)
    params = SamplingParams(temperature=0.0, grammar=LETTERS, top_logprobs=2)
    result = sampled(Sampler(VOCAB_SIZE, torch.device("cpu")), logits, [state_of(compiler, params)])
    told = result.logprobs[0]
    assert told is not None
    assert told.logprob == pytest.approx(float(logits.log_softmax(-1)[0, result.tokens[0]]), abs=1e-5)
    assert [token for token, _ in told.top] == logits.topk(2).indices[0].tolist()


# -- against transformers --------------------------------------------------------------------------------


class Masked(LogitsProcessor):
    """Applies a grammar's masks in transformers.generate, from a state of its own."""

    def __init__(self, state: GrammarState, prompt_len: int) -> None:
        self._state = state
        self._prompt_len = prompt_len

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        may = allowed(self._state, input_ids[0, self._prompt_len :].tolist())
        mask = torch.ones_like(scores, dtype=torch.bool)
        mask[0, sorted(may)] = False
        return scores.masked_fill(mask, -torch.inf)


def reference(
    path: Path, compiler: GrammarCompiler, grammar: Grammar, prompt: list[int], n: int
) -> list[int]:
    masks = LogitsProcessorList([Masked(begun(compiler, grammar), len(prompt))])
    return generate_with(path, prompt, n, logits_processor=masks, eos_token_id=EOS)


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("unknown", [False, True])
def test_tokens_equal_generate_with_the_same_masks(
    tmp_path_factory: pytest.TempPathFactory, overlap: bool, unknown: bool
) -> None:
    """Several grammars and a row without one in a batch. `unknown`: every step is launched before the result
    of the one before it is taken."""
    path, n = make_tiny("qwen3", tmp_path_factory.mktemp("model"), 3), 24
    rng = random.Random(6)
    prompts = [[rng.randrange(256) for _ in range(length)] for length in (5, 33, 20, 9)]
    grammars = [SCHEMA, LETTERS, Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object"}'), None]
    runner, _ = open_runner(path, 16, 60, overlap=overlap)
    driver = Driver(runner, 60, 16)
    lanes = []
    for prompt, grammar in zip(prompts, grammars, strict=True):
        params = SamplingParams(temperature=0.0, grammar=grammar)
        lane = driver.add(prompt, params)
        lane.state = SamplingState(
            params, np.array(prompt, np.int32), (EOS,), 0, lane.state.outputs, runner.grammars.begin(params)
        )
        lanes.append(lane)
    ours = driver.each_step(lanes, n, unknown)
    for prompt, grammar, tokens in zip(prompts, grammars, ours, strict=True):
        if grammar is None:
            continue
        expected = reference(path, runner.grammars, grammar, prompt, n)
        assert tokens[: len(expected)] == expected
    runner.close()
