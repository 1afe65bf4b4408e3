"""TokenMasks beside a step in flight: when it waits for the step before, and for which rows it works."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import pytest
import torch

from engine.grammar import GrammarCompiler
from engine.sampling_state import SamplingState
from engine.token_masks import TokenMasks
from tests.support.tiny_configs import VOCAB_SIZE
from tests.support.tiny_models import write_tokenizer
from wire.request import Grammar, GrammarKind, SamplingParams, ThoughtLimit

EOS = 258
DIGITS = SamplingParams(grammar=Grammar(GrammarKind.REGEX, "[0-9]{4}x"))


class Copies:
    """Completions of a device whose copies arrive only when they are waited for."""

    def __init__(self) -> None:
        self.recorded = self.waited = 0
        self.token = torch.zeros(1, dtype=torch.int64)
        self.arrives = 0

    def record(self) -> Copies:
        self.recorded += 1
        return self

    def wait(self, timeout_s: float) -> None:
        assert 0 < timeout_s < 1000
        self.waited += 1
        self.token[0] = self.arrives


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GrammarCompiler]:
    path = tmp_path_factory.mktemp("tokenizer")
    write_tokenizer(path)
    made = GrammarCompiler((path / "tokenizer.json").read_text, VOCAB_SIZE, [EOS])
    yield made
    made.close()


def masks_of(copies: Copies) -> TokenMasks:
    return TokenMasks(VOCAB_SIZE, torch.from_numpy, copies.record)


def state_of(
    compiler: GrammarCompiler, params: SamplingParams = DIGITS, outputs: Sequence[int] = ()
) -> SamplingState:
    return SamplingState(params, np.ones(1, np.int32), (EOS,), 0, list(outputs), compiler.begin(params))


def allowed(masks: TokenMasks, slot: int = 1) -> list[int]:
    return np.flatnonzero(np.unpackbits(masks.bits[slot].numpy(), bitorder="little")[:VOCAB_SIZE]).tolist()


def digit_tokens() -> list[int]:
    return list(range(ord("0") - ord("!"), ord("9") - ord("!") + 1))  # of byte-level tokens in order


def test_a_token_in_flight_is_waited_for_once_it_is_needed(
    compiler: GrammarCompiler,
) -> None:
    copies, digits = Copies(), digit_tokens()
    masks, state = masks_of(copies), state_of(compiler)
    masks.join([state])
    masks.follow(np.array([0]))
    assert allowed(masks) == digits
    for position in range(4):
        copies.arrives = digits[position]
        masks.add(copies.token, np.array([position]))
        assert copies.waited == position
        masks.follow(np.array([position + 1]))  # the host has no token of it yet
        assert copies.waited == position + 1
        assert not masks.refusals
        copies.token = torch.zeros(1, dtype=torch.int64)
    assert allowed(masks) == [ord("x") - ord("!")]
    state.outputs += digits[:4]
    masks.follow(np.array([4]))  # known, so nothing is waited for
    assert copies.waited == 4


def test_what_the_host_knows_is_not_waited_for(compiler: GrammarCompiler) -> None:
    copies, digits = Copies(), digit_tokens()
    masks, state = masks_of(copies), state_of(compiler)
    masks.join([state])
    for position in range(3):
        masks.follow(np.array([position]))
        masks.add(copies.token, np.array([position]))
        state.outputs.append(digits[position])
    assert (copies.recorded, copies.waited) == (3, 0)


def test_rows_without_grammars_cost_nothing(compiler: GrammarCompiler) -> None:
    copies = Copies()
    masks = masks_of(copies)
    masks.join([state_of(compiler, SamplingParams()) for _ in range(3)])
    masks.follow(np.zeros(3, dtype=np.int64))
    masks.add(torch.zeros(3, dtype=torch.int64), np.zeros(3, dtype=np.int64))
    assert copies.recorded == 0
    assert not len(masks.bits)


def test_a_limit_of_thoughts_costs_something_where_they_end(compiler: GrammarCompiler) -> None:
    copies, uploads = Copies(), []

    def to_device(array: np.ndarray) -> torch.Tensor:
        uploads.append(len(array))
        return torch.from_numpy(array)

    masks = TokenMasks(VOCAB_SIZE, to_device, copies.record)
    state = state_of(compiler, SamplingParams(thoughts=ThoughtLimit(3, (7, 8))))
    masks.join([state_of(compiler, SamplingParams()), state])
    found = []
    for position in range(7):
        if position == 4:
            state.outputs.append(1)  # the host gets the token of position 2 a step late
        masks.follow(np.array([position, position]))
        found.append((allowed(masks), len(uploads), copies.recorded, copies.waited))
        copies.token = torch.zeros(2, dtype=torch.int64)
        masks.add(copies.token, np.array([position, position]))
        if position != 2:
            state.outputs.append(1)
    free = list(range(VOCAB_SIZE))
    assert found == [
        *[(free, 1, 0, 0)] * 3,
        ([7], 2, 1, 1),
        ([8], 3, 2, 1),
        (free, 4, 2, 1),
        (free, 4, 2, 1),
    ]


def test_a_row_that_was_not_in_the_step_before_is_refused_alone(
    compiler: GrammarCompiler,
) -> None:
    """Its forward has failed, and so has it; the other rows of the next step must not."""
    copies, digits = Copies(), digit_tokens()
    masks, known, lost = masks_of(copies), state_of(compiler, outputs=digits[:1]), state_of(compiler)
    masks.join([lost, known])
    masks.follow(np.array([1, 1]))
    assert list(masks.refusals) == [0]
    assert len(allowed(masks, 1)) == VOCAB_SIZE  # some token is sampled, and not used
    assert allowed(masks, 2) == digits


def test_a_token_of_an_older_step_is_not_taken_for_the_newest(compiler: GrammarCompiler) -> None:
    copies, digits = Copies(), digit_tokens()
    masks, state = masks_of(copies), state_of(compiler)
    masks.join([state])
    masks.follow(np.array([0]))
    masks.add(copies.token, np.array([0]))
    state.outputs.append(digits[0])
    masks.follow(np.array([2]))  # the step at position 1 has failed
    assert list(masks.refusals) == [0]
    assert len(allowed(masks)) == VOCAB_SIZE
    assert copies.waited == 0


def test_a_sequence_keeps_its_place_when_others_come_and_go(compiler: GrammarCompiler) -> None:
    copies, digits = Copies(), digit_tokens()
    masks = masks_of(copies)
    states = [state_of(compiler, outputs=digits[:count]) for count in (0, 1, 4)]
    for order in ([0, 1, 2], [2, 0], [1], [0, 2, 1, 1]):
        chosen = [states[i] for i in dict.fromkeys(order)]
        masks.join([state_of(compiler, SamplingParams()), *chosen])
        masks.follow(np.array([0, *(len(state.outputs) for state in chosen)]))
        assert masks.slots([states[order[0]]]).tolist() == [1]
        for slot, state in enumerate(chosen, start=1):
            expected = digits if len(state.outputs) < 4 else [ord("x") - ord("!")]
            assert allowed(masks, slot) == expected


def test_a_row_that_may_sample_nothing_samples_something_that_is_not_used(compiler: GrammarCompiler) -> None:
    x = ord("x") - ord("!")
    only = Grammar(GrammarKind.REGEX, "x")
    masks = masks_of(Copies())
    masks.join([state_of(compiler, SamplingParams(grammar=only, stop_token_ids=(x,), min_tokens=5))])
    masks.follow(np.array([0]))
    assert list(masks.refusals) == [0]
    assert len(allowed(masks)) == VOCAB_SIZE
