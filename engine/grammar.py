"""GrammarCompiler: grammars compiled for a model's vocabulary. GrammarState: one sequence's place in one.

A grammar is compiled once, on a thread of its own, from when its request comes. No other request waits.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from engine.errors import NothingAllowed
from wire.grammars import LIMITS, matcher_grammar
from wire.request import Grammar, SamplingParams

MOST_COMPILED = 64
_NICENESS = 10
_COMPILE_S = 30.0  # the limits end every compilation long before
_WORD_BITS = 32


def mask_words(vocab_size: int) -> int:
    """int32 words of a mask with a bit for each token."""
    return -(-vocab_size // _WORD_BITS)


class GrammarCompiler:
    """Compiles grammars for one model. Any thread may ask; the newest ones are kept."""

    def __init__(
        self, read_tokenizer: Callable[[], str], vocab_size: int, eos_token_ids: Sequence[int]
    ) -> None:
        """`read_tokenizer` gives the contents of tokenizer.json; it is called on the compiler's thread.
        `vocab_size` is that of the model's logits."""
        self._read_tokenizer = read_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = [token for token in eos_token_ids if token < vocab_size]
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._tokenizer: LLTokenizer | None = None  # of the thread; None: it is not read, or could not be
        self._thread.submit(self._load)
        self._compiled: OrderedDict[Grammar, Future[LLMatcher]] = OrderedDict()
        self._lock = threading.Lock()

    def begin(self, params: SamplingParams) -> GrammarState | None:
        """The beginning of an output of the parameters' grammar, if they have one. Does not wait."""
        if params.grammar is None:
            return None
        compiled = self._compiling(params.grammar)
        return GrammarState(compiled, params, self._eos_token_ids, self._vocab_size)

    def close(self) -> None:
        """End the thread. What was compiled stays usable."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _compiling(self, grammar: Grammar) -> Future[LLMatcher]:
        """A matcher at the grammar's beginning, to be copied and not changed. The future raises
        NothingAllowed for a grammar that cannot be compiled."""
        with self._lock:
            compiled = self._compiled.get(grammar)
            if compiled is None:
                compiled = self._compiled[grammar] = self._begin_to_compile(grammar)
                if len(self._compiled) > MOST_COMPILED:
                    self._compiled.popitem(last=False)
            else:
                self._compiled.move_to_end(grammar)
        return compiled

    def _begin_to_compile(self, grammar: Grammar) -> Future[LLMatcher]:
        """The grammar's text is made here: what holds the GIL must not run at a lower priority."""
        try:
            text = matcher_grammar(grammar)
        except ValueError as error:
            refused: Future[LLMatcher] = Future()
            refused.set_exception(NothingAllowed(f"the grammar cannot be compiled: {error}"))
            return refused
        return self._thread.submit(self._compile, grammar, text)

    def _load(self) -> LLTokenizer:
        if self._tokenizer is not None:
            return self._tokenizer
        if not self._eos_token_ids:
            raise NothingAllowed("a grammar needs a model that names its end-of-sequence tokens")
        try:
            self._tokenizer = self._tokenizer_of(self._read_tokenizer())
        except (OSError, ValueError) as error:
            raise NothingAllowed(f"this model's tokenizer cannot be used with grammars: {error}") from error
        _step_back()
        return self._tokenizer

    def _tokenizer_of(self, text: str) -> LLTokenizer:
        try:
            return LLTokenizer(text, n_vocab=self._vocab_size, eos_token=self._eos_token_ids)
        except ValueError:  # perhaps it has more tokens than the model: Gemma 3's has one for images
            return LLTokenizer(text, eos_token=self._eos_token_ids)

    def _compile(self, grammar: Grammar, text: str) -> LLMatcher:
        try:
            tokenizer = self._load()
        except NothingAllowed:
            with self._lock:  # a file that could not be read may be there for the next request
                self._compiled.pop(grammar, None)
            raise
        try:
            matcher = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
        except ValueError as error:
            raise NothingAllowed(f"the grammar cannot be compiled: {error}") from error
        if matcher.is_error():
            raise NothingAllowed(f"the grammar cannot be compiled: {matcher.get_error()}")
        return matcher


class GrammarState:
    """Which tokens may follow a sequence's outputs.

    It depends on nothing but the outputs, so the matcher goes forward and back to the position that is asked
    for. Used while a forward is issued.
    """

    __slots__ = ("_always", "_before", "_compiled", "_eos", "_last_word", "_length", "_matcher", "_until")

    def __init__(
        self,
        compiled: Future[LLMatcher],
        params: SamplingParams,
        eos_token_ids: Sequence[int],
        vocab_size: int,
    ) -> None:
        """`vocab_size` is that of the model's logits; the matcher's tokenizer may have more tokens."""
        self._compiled = compiled
        self._last_word = np.uint32(0xFFFFFFFF >> -vocab_size % _WORD_BITS)  # its bits that stand for tokens
        self._eos = tuple(eos_token_ids)
        self._until = params.min_tokens
        self._always = self._eos if params.ignore_eos else ()  # these are banned
        self._before = (*self._eos, *params.stop_token_ids)  # and these before `_until`
        self._matcher: LLMatcher | None = None
        self._length = 0  # outputs that the matcher has consumed

    @property
    def is_compiled(self) -> bool:
        """Whether `follow` waits for nothing. Any thread may ask."""
        return self._compiled.done()

    def when_compiled(self, call: Callable[[], object]) -> None:
        """Call this, on another thread, when the grammar is compiled or cannot be."""
        self._compiled.add_done_callback(lambda _: call())

    def follow(self, outputs: Sequence[int], position: int, newest: int | None) -> None:
        """Go to output position `position`. Raises NothingAllowed.

        `outputs` may lack the token before it, which is `newest` then: another thread appends it when its
        result is taken.
        """
        matcher = self._matcher
        if matcher is None:
            matcher = self._matcher = self._compiled_in_time().deep_copy()
        if position < self._length:
            matcher.rollback(self._length - position)
        else:
            tokens = outputs[self._length : position]
            for token in tokens:
                matcher.consume_token(token)
            if len(tokens) < position - self._length:
                if newest is None or len(tokens) + 1 < position - self._length:
                    raise NothingAllowed("the tokens before this position are not known")
                matcher.consume_token(newest)
        self._length = position
        if matcher.is_error():
            raise NothingAllowed(
                f"the grammar does not allow this output: {_first_line(matcher.get_error())}"
            )

    def fill(self, row: npt.NDArray[np.int32]) -> None:
        """Write into `row` [words] the tokens that may stand at this position. Raises NothingAllowed.

        An end-of-sequence token is among them where the grammar is complete. `ignore_eos` and `min_tokens`
        remove it as long as there is another one: an output whose grammar leaves nothing more to say ends.
        """
        matcher, position = self._matcher, self._length
        assert matcher is not None, "follow comes first"
        mask = np.frombuffer(matcher.compute_bitmask(), np.int32)  # of all tokens of the tokenizer
        if matcher.is_error():
            raise NothingAllowed(f"the grammar has failed: {_first_line(matcher.get_error())}")
        row[:] = mask[: len(row)]
        row.view(np.uint32)[-1] &= self._last_word
        ends = [token for token in self._eos if _has(row, token)]
        for token in self._before if position < self._until else self._always:
            _clear(row, token)
        if row.any():
            return
        if not ends:
            raise NothingAllowed(f"after {position} tokens the grammar allows none that may be sampled")
        for token in ends:
            _set(row, token)

    def _compiled_in_time(self) -> LLMatcher:
        try:
            return self._compiled.result(_COMPILE_S)
        except TimeoutError as error:
            raise NothingAllowed(f"the grammar was not compiled within {_COMPILE_S} s") from error


def _step_back() -> None:
    """Forwards go first where there is no core for both. On Linux a thread has a priority of its own.

    Compiling releases the GIL. Reading the tokenizer does not: at a lower priority, on busy cores, all other
    threads of the process would wait for this one.
    """
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


def keep_only(row: npt.NDArray[np.int32], token: int) -> None:
    """Only this token may be sampled, if it may be."""
    if _has(row, token):
        row[:] = 0
        _set(row, token)


def take_out(row: npt.NDArray[np.int32], tokens: Iterable[int]) -> None:
    """These tokens may not be sampled."""
    for token in tokens:
        _clear(row, token)


def _first_line(text: str) -> str:
    return text.strip().partition("\n")[0]


def _has(row: npt.NDArray[np.int32], token: int) -> bool:
    return bool(row.view(np.uint32)[token // _WORD_BITS] >> (token % _WORD_BITS) & 1)


def _clear(row: npt.NDArray[np.int32], token: int) -> None:
    row.view(np.uint32)[token // _WORD_BITS] &= np.uint32(~(1 << token % _WORD_BITS) & 0xFFFFFFFF)


def _set(row: npt.NDArray[np.int32], token: int) -> None:
    row.view(np.uint32)[token // _WORD_BITS] |= np.uint32(1 << token % _WORD_BITS)
