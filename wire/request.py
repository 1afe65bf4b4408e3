"""One choice of one request, and its output."""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

import msgspec

from wire.numbers import Natural, Signed
from wire.page_hash import tenant_key

NOBODY = "\0room "
"""What the owner of a request without a tenant begins with. No header and no key can name such a tenant."""


class GrammarKind(StrEnum):
    """The language in which a grammar is written."""

    JSON_SCHEMA = "json_schema"
    REGEX = "regex"  # of the whole output; the syntax of Rust's regex crate
    LARK = "lark"  # llguidance's variant of Lark


class Grammar(msgspec.Struct, frozen=True, omit_defaults=True):
    """What an output must match as a whole. See wire/grammars.py."""

    kind: GrammarKind
    text: str
    around: str = ""  # in Lark: what the output matches, with this grammar as @body; "": the grammar itself


class Pooling(StrEnum):
    """How a prompt becomes one vector: the hidden state of its last token, or the mean of all tokens'."""

    LAST = "last"
    MEAN = "mean"


class ThoughtLimit(msgspec.Struct, frozen=True, omit_defaults=True):
    """Thoughts end after so many tokens: the tokens `closing` follow, unless they have ended before.

    They begin with the output, or behind the tokens `opening`, if the output begins with these.
    """

    tokens: Natural
    closing: tuple[Natural, ...]
    opening: tuple[Natural, ...] = ()


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How the next token is chosen. Stop strings are the router's: workers never see text."""

    max_new_tokens: Natural = 16
    temperature: float = 1.0  # 0 is greedy
    top_k: Natural = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: Natural = 0  # always set by the router; noise is a function of (seed, choice, position)
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[Natural, float] = {}
    allowed_token_ids: tuple[Natural, ...] = ()  # (): all
    min_tokens: Natural = 0
    stop_token_ids: tuple[Natural, ...] = ()
    ignore_eos: bool = False
    top_logprobs: Natural | None = None  # None: no logprobs; k: the chosen token's and the k best
    logprob_token_ids: tuple[Natural, ...] = ()  # are told behind the k best, in this order
    prompt_logprobs: Natural | None = None  # as top_logprobs, for the prompt's tokens
    grammar: Grammar | None = None
    pooling: Pooling | None = None  # None: no vector of the prompt is told
    thoughts: ThoughtLimit | None = None  # None: the model ends its thoughts
    bad_words: tuple[tuple[Natural, ...], ...] = ()  # sequences of tokens that the output may not have


class PromptMarks(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """What was said of a prompt: which of its pages are everybody's, and which never will be.

    `public`: so many tokens at its beginning are of a prefix that the operator has named (`public_prefixes`):
    their whole pages are public. `whole`: tokens of the longest named prefix that it begins with as a whole;
    at most `public`. `private_from`: the page from which on it is private for ever, answer included; what the
    operator has named stays public.
    """

    public: Natural = 0
    whole: Natural = 0
    private_from: Natural | None = None


NO_MARKS = PromptMarks()


class RequestCore(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """What the router and the workers both need of a request. Extended by what each of them adds."""

    request_id: str
    sampling: SamplingParams
    extra_key: str = ""
    cache_salt: str = ""
    tenant: str = ""
    priority: Signed = 0  # greater runs first


class GenerateRequest(RequestCore, frozen=True, omit_defaults=True, kw_only=True):
    """One choice of one request, as prefill and decode workers get it.

    `prompt` is int32 little-endian token ids. `forced` are the output tokens the router has already
    forwarded (a restarted or migrated request): they are input, and the next position is sampled.
    `arrived_ns` is when the request came to its router, by the Unix clock: the same in every epoch, so that a
    restart keeps its place in the workers' queues. `tenant_generation`: see wire/page_hash.py. `marks` are
    the router's word on the prompt.
    """

    room: Natural
    epoch: Natural
    prompt: bytes
    choice: Natural = 0
    forced: tuple[Natural, ...] = ()
    arrived_ns: Natural = 0
    tenant_generation: Natural = 0
    marks: PromptMarks = NO_MARKS

    @property
    def tenant_key(self) -> str:
        """What its private cached pages are known by; "": all of its pages are everybody's."""
        known_by = tenant_key(self.tenant, self.tenant_generation)
        return page_owner(known_by, self.marks, self.room - self.choice)


def page_owner(known_by: str, marks: PromptMarks, first_room: int) -> str:
    """Whose the private pages of a prompt are. `known_by` is the tenant's key string, and `first_room` the
    room of the prompt's first choice.

    Without a tenant nobody can say whose a private page is. So it is the request's own, and no later request
    finds it.
    """
    if known_by or marks.private_from is None:
        return known_by
    return f"{NOBODY}{first_room}"


class FinishReason(StrEnum):
    """Why a room's output ended."""

    STOP = "stop"
    LENGTH = "length"


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Natural-log probability of the chosen token, and of the best ones, (token, logprob) best first."""

    logprob: float
    top: list[tuple[Natural, float]] = []


class TokenRun(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """Tokens of one room from output position `start` on.

    `logprobs`, when asked for, is as long as `tokens`. `cached_tokens` counts prompt tokens that were not
    computed again anywhere. `prompt_logprobs`, when asked for, come with position 0: those of all tokens of
    the prompt but the first. So does `pooled`: the prompt's vector, float32, little-endian.
    """

    room: Natural
    epoch: Natural
    start: Natural
    tokens: list[Natural]
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    cached_tokens: Natural = 0
    prompt_logprobs: list[TokenLogprobs] | None = None
    pooled: bytes | None = None


class OutputDelta(msgspec.Struct, frozen=True, gc=False):
    """New output of a room, as it is passed within a process. Not a message.

    `logprobs`, when asked for, is as long as `tokens`. `finish` comes with the last tokens. `matched` is the
    stop string or the stop token that ended the output, where one did and it is known. `prompt_logprobs` and
    `pooled` are as in TokenRun. `starts` are the places at which several tokens begin in the text that they
    have added; one begins at 0.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs] | None = None
    finish: FinishReason | None = None
    matched: str | int | None = None
    prompt_logprobs: list[TokenLogprobs] | None = None
    pooled: bytes | None = None
    starts: Sequence[int] = ()
