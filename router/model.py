"""Model: one served model, as the router sees it: its text side, its requests, its versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from common.errors import ContextTooLong, InvalidRequest, Unavailable
from router.options import PublicPrefix, RoutedModel
from router.placement.models import ModelVersions
from router.streams.room_requests import RoomRequests
from router.text.chat import Chat
from router.text.fill_in import FillInForm, fill_in_form
from router.text.grammars import Wanted
from router.text.long_texts import LONG, LongTexts
from router.text.output_formats import PROMPT_END, OutputFormats, Parsing
from router.text.output_grammars import CallsWanted
from router.text.public_prefixes import PublicPrefixes
from router.text.reasoning import ReasoningStart
from router.text.sampling_defaults import SamplingDefaults, read_defaults
from router.text.tokenization import Tokenization
from router.text.tool_formats.calls import Schemas
from wire.request import GrammarKind, ThoughtLimit


@dataclass(frozen=True, slots=True)
class Model:
    """Each model has its own tokenizer, chat template, workers and queues."""

    name: str
    tokenization: Tokenization
    sampling_defaults: SamplingDefaults
    requests: RoomRequests
    versions: ModelVersions
    long_texts: LongTexts
    formats: OutputFormats
    public_prefixes: PublicPrefixes
    fill_in: FillInForm | None

    @classmethod
    def load(
        cls,
        one: RoutedModel,
        requests: RoomRequests,
        versions: ModelVersions,
        long_texts: LongTexts,
        public_prefixes: Sequence[PublicPrefix] = (),
    ) -> Self:
        """Read the text side of a model's directory. Raises ConfigError."""
        tokenization = Tokenization(one.model, one.chat_template)
        defaults = read_defaults(one.model, one.generation_config)
        added = tokenization.added_ids()
        formats = OutputFormats(
            tokenization.templates, added, tokenization.detokenizers.special_ids,
            one.tool_call_parser, one.reasoning_parser,
        )  # fmt: skip
        prefixes = PublicPrefixes(tokenization, public_prefixes)
        return cls(
            one.served_model_name, tokenization, defaults, requests, versions, long_texts, formats, prefixes,
            fill_in_form(added),
        )  # fmt: skip

    def parsing(
        self,
        prompt: list[int],
        schemas: Schemas | None,
        with_reasoning: bool,
        shows_special: bool,
        required: bool = False,
        continued: str = "",
    ) -> Parsing | None:
        """How the outputs of a chat's prompt are read (OutputFormats.parsing)."""
        return self.formats.parsing(
            self._end(prompt, continued), schemas, with_reasoning, shows_special, required, continued
        )

    def wanted_around(
        self, prompt: list[int], wanted: Wanted | None, calls: CallsWanted | None, continued: str = ""
    ) -> Wanted | None:
        """What the outputs of a chat's prompt have to match: its content `wanted`, reasoning before it, and
        calls. `continued`: the text of the message with which they go on."""
        if wanted is None and calls is None:
            return None
        around = self.formats.grammar(self._end(prompt, continued), calls, wanted is not None, continued)
        parts = () if calls is None else tuple((tool.place, tool.arguments()) for tool in calls.tools)
        if wanted is not None and not (calls is not None and calls.required):
            return wanted._replace(around=around, parts=parts)
        return Wanted("tools", GrammarKind.LARK, around, is_ours=True, parts=parts) if around else None

    def thought_limit(
        self, prompt: list[int], tokens: int, most: int, continued: str = ""
    ) -> ThoughtLimit | None:
        """Lets the outputs of a chat's prompt, of at most `most` tokens, think for so many of them. None if
        they have no thoughts, or end before. Raises InvalidRequest if it is not known how thoughts end."""
        tags = self.formats.thought_tags
        if tags is None:
            raise InvalidRequest(
                "how this model's thoughts end is not known: name a reasoning_parser", "thinking_token_budget"
            )
        start = tags.start(self._end(prompt, continued), continued)
        closing = self._tag_ids(tags.closing)
        if start is ReasoningStart.NEVER or tokens + len(closing) >= most:
            return None
        opening = self._tag_ids(tags.opening) if start is ReasoningStart.MAY else ()
        return ThoughtLimit(tokens, closing, opening)

    def _tag_ids(self, tag: str) -> tuple[int, ...]:
        token = self.formats.added_id(tag)
        return tuple(self.tokenization.encode(tag, False)) if token is None else (token,)

    def _end(self, prompt: list[int], continued: str) -> str:
        """The text of PROMPT_END tokens before the continued text, whose tokens have a byte at least, and of
        it."""
        return self.tokenization.decode(prompt[-PROMPT_END - len(continued.encode()) :])

    async def encode(
        self, text: str, add_special_tokens: bool, param: str, any_length: bool = False
    ) -> list[int]:
        """Token ids of a text, of any length or else of one that may fit.

        Raises ContextTooLong, and Overloaded for a long one.
        """
        if len(text) <= LONG:
            return self.tokenization.encode(text, add_special_tokens)
        if not any_length:
            self._check_length(text, param)
        return await self.long_texts.run(
            len(text), lambda: self.tokenization.encode(text, add_special_tokens)
        )

    async def encode_chat(self, chat: Chat, any_length: bool = False) -> list[int]:
        """The same for a chat."""
        if chat.size <= LONG:
            return self.tokenization.encode_chat(chat)

        def check(rendered: str) -> None:
            if not any_length:
                self._check_length(rendered, "messages")

        return await self.long_texts.run(chat.size, lambda: self.tokenization.encode_chat(chat, check))

    async def vocabulary_texts(self, tokens: list[int]) -> list[str]:
        """Tokens as the vocabulary writes them. Raises Overloaded for many."""
        if len(tokens) <= LONG:
            return self.tokenization.vocabulary_texts(tokens)
        return await self.long_texts.run(len(tokens), lambda: self.tokenization.vocabulary_texts(tokens))

    def _check_length(self, text: str, param: str) -> None:
        """Refuse a text that is longer than the context whatever its tokens are, before they are known."""
        limit = self.versions.context_limit
        tokens = len(text.encode()) // self.tokenization.longest_token_bytes
        if limit is not None and tokens > limit:
            raise ContextTooLong(tokens, limit, param)

    def room_for(self, prompt: list[int], wanted: int | None, param: str) -> int:
        """How many output tokens a prompt may have: `wanted`, or what the context leaves.

        Raises InvalidRequest for an empty prompt, ContextTooLong for one that does not fit.
        """
        if not prompt:
            raise InvalidRequest("the prompt is empty", param)
        limit = self.versions.context_limit
        if limit is None:
            if wanted is None:
                raise Unavailable("no worker has said yet how long an answer may be")
            return wanted  # a worker that comes within the wait will judge
        if len(prompt) + (wanted if wanted is not None else 1) > limit:
            raise ContextTooLong(len(prompt) + (wanted if wanted is not None else 1), limit, param)
        return wanted if wanted is not None else limit - len(prompt)
