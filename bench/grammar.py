"""What structured output costs, and whether it is right: `python -m bench.grammar --json`.

`ratios`, on shape M in a real scheduler:

    mask_share_b8    of a decode step of 8 rows with grammars: the part by which it is longer than one without
    neighbour_itl    a step of 4 decoding rows while in every step a request comes whose grammar must be
                     compiled / the same while requests without a grammar come

`values`: over 300 random schemas (bench/grammar_schemas.py), 8 at a time, with a vocabulary of 32,768 and
random logits in favour of the signs of JSON, the outputs that `ended` within 600 tokens, those of them that
are `valid`, and those that `crashed`. `compile_ms_p50`, `compile_ms_max`: of their grammars.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from contextlib import closing
from pathlib import Path

import jsonschema
import numpy as np
import torch

from bench.common import alternate, argument_parser, medians, print_result, seconds
from bench.engine_rig import EngineRig
from bench.grammar_schemas import Schema, make_schemas
from bench.grammar_vocabulary import make_tokenizer
from bench.make_model import make_model
from engine.batch import SamplingRows
from engine.grammar import GrammarCompiler
from engine.sampler import Sampler
from engine.sampling_state import SamplingState
from wire.request import Grammar, GrammarKind, SamplingParams

CONTEXT = 128
STEPS = 24
ROUNDS = 5
SCHEMAS = 300
BATCH = 8
VOCAB = 32_768
MOST_TOKENS = 600
_FAVOUR = 9.0
_SIGNS = ("{", "}", "[", "]", '"', ",", ":", "0", "1", "-", "a", "n", "t", "f", "e", '":', '",', '"}')
ENDLESS = Grammar(  # as `ignore_eos`: no output ends before its last step
    GrammarKind.JSON_SCHEMA, '{"type": "array", "items": {"type": "string"}, "minItems": 4000}'
)


def grammar_of(schema: Schema) -> Grammar:
    """As the router sends it."""
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def serving_ratios(model: Path, threads: int) -> dict[str, float]:
    """mask_share_b8 and neighbour_itl."""
    new = iter(make_schemas((ROUNDS + 1) * STEPS, seed=3))  # each is compiled once
    with EngineRig(str(model), threads) as rig:

        def steps(grammar: Grammar | None) -> float:
            return statistics.median(rig.decode_steps(BATCH, CONTEXT, STEPS, grammar))

        def beside(compiling: bool) -> float:
            arriving = [grammar_of(next(new)) if compiling else None for _ in range(STEPS)]
            return statistics.mean(rig.steps_beside(CONTEXT, arriving))

        sides = {
            "plain": lambda: steps(None),
            "masked": lambda: steps(ENDLESS),
            "alone": lambda: beside(False),
            "compiling": lambda: beside(True),
        }
        alternate(sides, 1)  # warm
        took = medians(alternate(sides, ROUNDS))
    return {
        "mask_share_b8": max(0.0, 1 - took["plain"] / took["masked"]),
        "neighbour_itl": took["compiling"] / took["alone"],
    }


class Outputs:
    """Outputs of schemas, from random logits."""

    def __init__(self) -> None:
        self._tokenizer = make_tokenizer(VOCAB)
        self._eos = VOCAB - 1
        self._random = torch.Generator().manual_seed(4)
        signs = [self._tokenizer.token_to_id(sign) for sign in _SIGNS]
        self._favoured = torch.tensor([self._eos, *(token for token in signs if token is not None)])
        self.compile_ms: list[float] = []
        self.ended = self.valid = self.crashed = 0

    def run(self, schemas: list[Schema]) -> None:
        """Count what becomes of them."""
        with closing(GrammarCompiler(self._tokenizer.to_str, VOCAB, [self._eos])) as compiler:
            for first in range(0, len(schemas), BATCH):
                self._run_batch(compiler, schemas[first : first + BATCH])

    def _run_batch(self, compiler: GrammarCompiler, schemas: list[Schema]) -> None:
        running = [(schema, self._state(compiler, schema)) for schema in schemas]
        sampler = Sampler(VOCAB, torch.device("cpu"))
        for position in range(MOST_TOKENS):
            if not running:
                return
            logits = torch.randn(len(running), VOCAB, generator=self._random)
            logits[:, self._favoured] += _FAVOUR
            positions = np.full(len(running), position)
            rows = SamplingRows(tuple(state for _, state in running), positions)
            sampled = sampler.sample(logits, rows, torch.from_numpy(positions)).wait()
            failed = sampled.failures | sampled.refusals
            going: list[tuple[Schema, SamplingState]] = []
            for i, (schema, state) in enumerate(running):
                if i in failed:
                    self.crashed += 1
                elif int(sampled.tokens[i]) == self._eos:
                    self._check(schema, state.outputs)
                else:
                    state.outputs.append(int(sampled.tokens[i]))
                    going.append((schema, state))
            running = going

    def _state(self, compiler: GrammarCompiler, schema: Schema) -> SamplingState:
        params = SamplingParams(seed=len(self.compile_ms), grammar=grammar_of(schema))
        grammar = compiler.begin(params)
        assert grammar is not None
        self.compile_ms.append(seconds(lambda: grammar.follow([], 0, None)) * 1e3)
        return SamplingState(params, np.zeros(1, np.int32), (self._eos,), grammar=grammar)

    def _check(self, schema: Schema, tokens: list[int]) -> None:
        self.ended += 1
        validator = jsonschema.Draft202012Validator(
            schema, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER
        )
        try:
            self.valid += validator.is_valid(json.loads(self._tokenizer.decode(tokens)))
        except ValueError:
            return  # it is no JSON


def main() -> None:
    """Measure and print."""
    parser = argument_parser(__doc__)
    parser.add_argument("--model", type=Path, help="shape M's directory; written there if it is missing")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        directory = options.model or Path(scratch)
        make_model(directory)
        ratios = serving_ratios(directory, options.threads)
    outputs = Outputs()
    outputs.run(make_schemas(SCHEMAS))
    values = {
        "ended": outputs.ended,
        "valid": outputs.valid,
        "crashed": outputs.crashed,
        "compile_ms_p50": round(statistics.median(outputs.compile_ms), 3),
        "compile_ms_max": round(max(outputs.compile_ms), 3),
    }
    print_result("grammar", {name: round(value, 3) for name, value in ratios.items()}, values, options.json)


if __name__ == "__main__":
    main()
