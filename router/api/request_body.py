"""What the bodies of all requests for tokens have in common.

An unknown field is refused by name: the answer to a request of which a part is ignored may be wrong.
"""

from __future__ import annotations

import random
from typing import Annotated, Any, TypeVar, get_args

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from common.errors import InvalidRequest
from router.api.other_fields import OTHER_FIELDS, take_other_fields
from router.api.structure_fields import StructureFields
from router.model import Model
from router.text.chat import MOST_TEXT
from wire.request import Grammar, SamplingParams
from wire.sampling_ranges import (
    LOGIT_BIAS,
    MOST_BAD_WORDS,
    MOST_WORD_TOKENS,
    PENALTY,
    PROBABILITY,
    REPETITION_PENALTY,
    TEMPERATURE,
    ParamRange,
)

LONGEST_LABEL = 256  # characters
MOST_PROMPTS = 256
MOST_INPUTS = 2048  # of a request for vectors, as OpenAI takes them
MOST_ROOMS = 1024  # of a request: prompts x n
MOST_TOKENS = 1 << 22  # of a prompt; what the model serves is less
_MOST_FIELDS = 128
_MOST_BIASES = 1024
_MOST_STOPS = 16
_MOST_ALLOWED = 65_536
_MOST_STOP_TOKENS = 1024
_MOST_BAD_WORDS = MOST_BAD_WORDS // 2  # each is two of a worker's
_LONGEST_STOP = 1024  # characters
_LONGEST_TOLD = 200  # characters of a request in an error message

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Label = Annotated[str, Field(max_length=LONGEST_LABEL)]
Text = Annotated[str, Field(max_length=MOST_TEXT)]
# fail_fast: a hostile body gets one error, and not one for each of its items.
Texts = Annotated[list[Text], Field(max_length=MOST_PROMPTS, fail_fast=True)]
Tokens = Annotated[list[TokenId], Field(max_length=MOST_TOKENS, fail_fast=True)]
TokenLists = Annotated[list[Tokens], Field(max_length=MOST_PROMPTS, fail_fast=True)]
Prompts = Text | Texts | Tokens | TokenLists
Inputs = (
    Text
    | Annotated[list[Text], Field(max_length=MOST_INPUTS, fail_fast=True)]
    | Tokens
    | Annotated[list[Tokens], Field(max_length=MOST_INPUTS, fail_fast=True)]
)
BadWord = Annotated[str, Field(min_length=1, max_length=128)]
OutputLength = Annotated[int, Field(ge=1, lt=2**31)]
Bias = Annotated[float, Field(ge=LOGIT_BIAS.low, le=LOGIT_BIAS.high)]
Body = TypeVar("Body", bound=BaseModel)


def _few_biases(value: Any) -> Any:
    """Before each of them is looked at: a hostile body would get an error for each."""
    if isinstance(value, dict) and len(value) > _MOST_BIASES:
        raise InvalidRequest(f"logit_bias takes at most {_MOST_BIASES} tokens", "logit_bias")
    return value


def _within(allowed: ParamRange, default: float | None) -> Any:
    return Field(default, ge=allowed.low, le=allowed.high)


class RequestBody(BaseModel):
    """How a request is served, whatever it samples."""

    model_config = ConfigDict(extra="forbid")

    stream: bool = False
    user: Label = ""
    priority: int = Field(0, ge=-(2**31), lt=2**31)
    cache_salt: Label = ""
    extra_key: Label = ""
    private_from_page: int | None = Field(
        None, ge=0, lt=2**31,
        description="from this page of KV on, prompt and answer are never shared with other tenants; 0: all "
        "but what the operator has made public",
    )  # fmt: skip


class SamplingBody(StructureFields):
    """How tokens are sampled, and where an output ends."""

    # Empty collections come from factories: pydantic deep-copies a default, which took half of the parsing.
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    # None: as the model's generation_config.json says (SamplingDefaults).
    temperature: float | None = _within(TEMPERATURE, None)
    top_p: float | None = Field(None, gt=PROBABILITY.low, le=PROBABILITY.high)
    top_k: int | None = Field(None, ge=-1, lt=2**31, description="0 or -1: off")
    min_p: float | None = _within(PROBABILITY, None)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    presence_penalty: float = _within(PENALTY, 0.0)
    frequency_penalty: float = _within(PENALTY, 0.0)
    repetition_penalty: float | None = _within(REPETITION_PENALTY, None)
    logit_bias: Annotated[dict[TokenId, Bias], BeforeValidator(_few_biases)] = Field(default_factory=dict)
    allowed_token_ids: list[TokenId] = Field(
        default_factory=list, max_length=_MOST_ALLOWED, fail_fast=True, description="no others are sampled"
    )
    bad_words: list[BadWord] = Field(
        default_factory=list, max_length=_MOST_BAD_WORDS, fail_fast=True,
        description="words that the output does not have, as they are written and with a space before them",
    )  # fmt: skip
    min_tokens: int = Field(0, ge=0, description="neither a token nor a stop string ends the output before")
    stop: str | Annotated[list[str], Field(fail_fast=True)] = Field(default_factory=list)
    stop_token_ids: list[TokenId] = Field(default_factory=list, max_length=_MOST_STOP_TOKENS, fail_fast=True)
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    no_stop_trim: bool = Field(False, description="include_stop_str_in_output, as SGLang calls it")
    n: int = Field(1, ge=1, le=128)

    def stops(self) -> tuple[str, ...]:
        """Stop strings. Raises InvalidRequest for too many, or an empty or very long one."""
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)
        if len(stops) > _MOST_STOPS or not all(0 < len(stop) <= _LONGEST_STOP for stop in stops):
            raise InvalidRequest(
                f"stop takes at most {_MOST_STOPS} strings, none of them empty or longer than "
                f"{_LONGEST_STOP} characters", "stop",
            )  # fmt: skip
        return stops

    def sampling(
        self, max_new_tokens: int, top_logprobs: int | None, model: Model, grammar: Grammar | None
    ) -> SamplingParams:
        """For the workers, with a seed. Raises InvalidRequest for tokens outside the vocabulary."""
        vocab_size, default = model.tokenization.vocab_size, model.sampling_defaults
        for name, tokens in (
            ("logit_bias", self.logit_bias),
            ("stop_token_ids", self.stop_token_ids),
            ("allowed_token_ids", self.allowed_token_ids),
        ):
            for token in tokens:
                if token >= vocab_size:
                    raise InvalidRequest(f"token {token} is not in the vocabulary of {vocab_size}", name)
        if self.min_tokens > max_new_tokens:
            raise InvalidRequest(
                f"min_tokens {self.min_tokens} exceeds the {max_new_tokens} tokens asked for", "min_tokens"
            )
        return SamplingParams(
            bad_words=self._bad_words(model),
            max_new_tokens=max_new_tokens,
            temperature=default.temperature if self.temperature is None else self.temperature,
            top_k=default.top_k if self.top_k is None else max(0, self.top_k),
            top_p=default.top_p if self.top_p is None else self.top_p,
            min_p=default.min_p if self.min_p is None else self.min_p,
            seed=random.getrandbits(63) if self.seed is None else self.seed % (1 << 63),
            repetition_penalty=(
                default.repetition_penalty if self.repetition_penalty is None else self.repetition_penalty
            ),
            presence_penalty=self.presence_penalty,
            frequency_penalty=self.frequency_penalty,
            logit_bias=self.logit_bias,
            allowed_token_ids=tuple(self.allowed_token_ids),
            min_tokens=self.min_tokens,
            stop_token_ids=tuple(self.stop_token_ids),
            ignore_eos=self.ignore_eos,
            top_logprobs=top_logprobs,
            grammar=grammar,
        )

    def _bad_words(self, model: Model) -> tuple[tuple[int, ...], ...]:
        """Their tokens. A tokenizer may have other ones for a word behind a space."""
        texts = (before + word.lstrip() for word in self.bad_words for before in ("", " "))
        words = dict.fromkeys(tuple(model.tokenization.encode(text, False)) for text in texts)
        if any(len(word) > MOST_WORD_TOKENS for word in words):
            raise InvalidRequest(f"a word has more than {MOST_WORD_TOKENS} tokens", "bad_words")
        return tuple(word for word in words if word)


def parse(kind: type[Body], raw: dict[str, Any]) -> Body:
    """A body of that kind; null counts as absent. Raises InvalidRequest with the name of the wrong field.

    What other servers' bodies have and this one has not: other_fields.py.
    """
    if len(raw) > _MOST_FIELDS:
        raise InvalidRequest(f"the body has {len(raw)} fields; at most {_MOST_FIELDS} are possible")
    given = {key: value for key, value in raw.items() if value is not None}
    if not OTHER_FIELDS.keys().isdisjoint(given):
        take_other_fields(given, kind.model_fields)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        # Of a value that may be of several types: what is wrong with it as the type that it is.
        first = next((one for one in errors if not one["type"].endswith("_type")), errors[0])
        param = _name(kind, first["loc"])
        # Without the names of types, list[...], which pydantic puts in where a value may be of several.
        where = ".".join(part for part in map(str, first["loc"]) if "[" not in part)[:_LONGEST_TOLD]
        if first["type"] == "extra_forbidden":
            named = where if param == first["loc"][0] else param
            raise InvalidRequest(f"the field {named!r} is not supported", param) from None
        raise InvalidRequest(f"{where}: {first['msg']}", param) from None


def _name(kind: type[BaseModel], place: tuple[int | str, ...]) -> str | None:
    """The field that is wrong: `stop`, or one of an object of fields, `stream_options.include_usage`."""
    if not place:
        return None
    name, field = str(place[0]), kind.model_fields.get(str(place[0]))
    inner = [one for one in get_args(field.annotation) if _is_model(one)] if field is not None else []
    if len(inner) == 1 and len(place) > 1:
        name = f"{name}.{_name(inner[0], place[1:])}"
    return name[:_LONGEST_TOLD]


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)
