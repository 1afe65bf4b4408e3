"""llguidance beside xgrammar: `python -m bench.grammar_peers --json`, in an environment that has both.

Nothing of Baton's is imported. `values`, for each library, over 100 random schemas (bench/grammar_schemas.py)
and vocabularies of 32,768 and 151,936 tokens:

    import_s, import_modules     of the library alone, in a process of its own: seconds, and how many modules
    check_ms_p50, check_ms_max   whether a schema is right, without a tokenizer
    compile_ms_*_p50, _max       a matcher of a schema
    mask_us_*_p50, _p99          a row of a mask, over random walks
    back_us                      going back by 8 tokens
    refused                      schemas that the library does not take
"""

from __future__ import annotations

import importlib
import json
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from bench.common import argument_parser, print_result
from bench.grammar_schemas import make_schemas
from bench.grammar_vocabulary import make_tokenizer

SIZES = {"32k": 32_768, "151k": 151_936}
SCHEMAS = 100
WALK = 40
_BACK = 8
_IMPORT = (
    "import sys, time; t = time.perf_counter(); import {0}; print(time.perf_counter() - t, len(sys.modules))"
)


class Matcher(Protocol):
    """A compiled grammar at its beginning."""

    def fill(self) -> npt.NDArray[np.int32]:
        """int32 [words]: the mask."""

    def accept(self, token: int) -> bool:
        """Whether the output goes on after this token."""

    def back(self, tokens: int) -> None:
        """Forget the last tokens."""


class Llguidance:
    """llguidance."""

    def __init__(self, size: int) -> None:
        self._of: Any = importlib.import_module("llguidance")
        self._fill: Any = importlib.import_module("llguidance.numpy").fill_next_token_bitmask
        self._tokenizer = self._of.LLTokenizer(
            make_tokenizer(size).to_str(), n_vocab=size, eos_token=size - 1
        )
        self._mask = np.zeros((1, size // 32), dtype=np.int32)

    def check(self, schema: str) -> str:
        """What is wrong with a schema."""
        problem: str = self._of.LLMatcher.validate_grammar(
            self._of.LLMatcher.grammar_from_json_schema(schema)
        )
        return problem

    def compile(self, schema: str) -> Matcher:
        """A matcher."""
        matcher = self._of.LLMatcher(self._tokenizer, self._of.LLMatcher.grammar_from_json_schema(schema))
        fill, mask = self._fill, self._mask

        class Of:
            def fill(self) -> npt.NDArray[np.int32]:
                fill(matcher, mask)
                found: npt.NDArray[np.int32] = mask[0]
                return found

            def accept(self, token: int) -> bool:
                return bool(matcher.consume_token(token)) and not matcher.is_stopped()

            def back(self, tokens: int) -> None:
                matcher.rollback(tokens)

        return Of()


class Xgrammar:
    """xgrammar."""

    def __init__(self, size: int) -> None:
        self._of: Any = importlib.import_module("xgrammar")
        tokenizer = make_tokenizer(size)
        texts = [text for text, _ in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])]
        info = self._of.TokenizerInfo(texts, self._of.VocabType.BYTE_LEVEL, stop_token_ids=[size - 1])
        self._compiler = self._of.GrammarCompiler(info, max_threads=1, cache_enabled=False)
        self._mask = self._of.allocate_token_bitmask(1, size)

    def check(self, schema: str) -> str:
        """What is wrong with a schema."""
        try:
            self._of.Grammar.from_json_schema(schema)
        except RuntimeError as error:
            return str(error)
        return ""

    def compile(self, schema: str) -> Matcher:
        """A matcher."""
        matcher = self._of.GrammarMatcher(self._compiler.compile_json_schema(schema))
        mask = self._mask

        class Of:
            def fill(self) -> npt.NDArray[np.int32]:
                matcher.fill_next_token_bitmask(mask)
                found: npt.NDArray[np.int32] = mask[0].numpy()
                return found

            def accept(self, token: int) -> bool:
                return bool(matcher.accept_token(token)) and not matcher.is_terminated()

            def back(self, tokens: int) -> None:
                matcher.rollback(tokens)

        return Of()


def timed(into: list[float], factor: float, work: Callable[..., Any], *arguments: object) -> Any:
    """What `work` returns; its seconds, times `factor`, are added to `into`."""
    started = time.perf_counter()
    result = work(*arguments)
    into.append((time.perf_counter() - started) * factor)
    return result


def walk(matcher: Matcher, size: int, rng: random.Random, masks: list[float], backs: list[float]) -> None:
    """Tokens at random among those that are allowed, and once back."""
    done = 0
    for _ in range(WALK):
        mask = timed(masks, 1e6, matcher.fill)
        may = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little")[:size])
        if not len(may) or not matcher.accept(int(rng.choice(may))):
            return
        done += 1
    timed(backs, 1e6, matcher.back, min(done, _BACK))


def measure(kind: type[Llguidance] | type[Xgrammar], schemas: list[str]) -> dict[str, float]:
    """One library's values."""
    checks: list[float] = []
    backs: list[float] = []
    values: dict[str, float] = {}
    for name, size in SIZES.items():
        library = kind(size)
        good = [schema for schema in schemas if not timed(checks, 1e3, library.check, schema)]
        values["refused"] = len(schemas) - len(good)
        compiled: list[float] = []
        masks: list[float] = []
        rng = random.Random(2)
        for schema in good:
            matcher = timed(compiled, 1e3, library.compile, schema)
            walk(matcher, size, rng, masks, backs)
        values |= {
            f"compile_ms_{name}_p50": statistics.median(compiled),
            f"compile_ms_{name}_max": max(compiled),
        }
        values |= {
            f"mask_us_{name}_{p}": float(np.percentile(masks, q)) for p, q in (("p50", 50), ("p99", 99))
        }
    values |= {"check_ms_p50": statistics.median(checks), "check_ms_max": max(checks)}
    return {**values, "back_us": statistics.median(backs)}


def main() -> None:
    """Measure and print."""
    options = argument_parser(__doc__).parse_args()
    schemas = [json.dumps(schema) for schema in make_schemas(SCHEMAS)]
    values: dict[str, float] = {}
    for name, kind in (("llguidance", Llguidance), ("xgrammar", Xgrammar)):
        told = subprocess.run(
            [sys.executable, "-c", _IMPORT.format(name)], capture_output=True, text=True, check=True
        )
        seconds, modules = told.stdout.split()
        own = {"import_s": float(seconds), "import_modules": int(modules), **measure(kind, schemas)}
        values |= {f"{name}_{key}": round(value, 2) for key, value in own.items()}
    print_result("grammar_peers", {}, values, options.json)


if __name__ == "__main__":
    main()
