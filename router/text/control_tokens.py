"""The tokens that only a chat template may put into a chat, and token ids of chats in which users spell some.

As in transformers, these are the special ones, and those that the tokenizer's configuration lists as
`chat_control_tokens`, else those that the template names (`<think>`); and those that look like one
(`<|fim_prefix|>`). Other added tokens (a run of spaces, `<table>`) stand for their text, wherever it is.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Container, Iterable
from itertools import accumulate

from tokenizers import AddedToken, Regex, Tokenizer, pre_tokenizers

from common.errors import InvalidRequest
from router.text.longest_text import NOTHING, any_of, expression
from router.text.template_marks import TemplateMarks

_LOOKS_LIKE_ONE = re.compile(r"<([|\uff5c]).*\1>", re.DOTALL)
_UNKNOWN = "\U0010fffd"  # in no vocabulary


class ControlTokens:
    """The control tokens of one tokenizer and its chat templates. Any thread may call its methods."""

    def __init__(self, tokenizer: Tokenizer, named_in: Container[str]) -> None:
        """`named_in`: the list of those that are not special, or a text that has them, as templates do."""
        added = tokenizer.get_added_tokens_decoder()
        ids = {
            token.content: token_id
            for token_id, token in added.items()
            if token.content.strip()
            and (token.special or token.content in named_in or _LOOKS_LIKE_ONE.fullmatch(token.content))
        }
        self.marks = TemplateMarks(ids)
        self._any = any_of(ids) or NOTHING
        self._risky = _spelled_or_begun(set(ids))
        # A text that does not spell one may do so when it is normalized.
        self._normalized = tokenizer.normalizer is not None and any(
            token.normalized for token in added.values() if token.content in ids
        )
        # No request can bring these names: the nonce is drawn in this process, and told to nobody.
        nonce = secrets.token_hex(16)
        self._names = {text: f"<{nonce}-{token_id}>" for text, token_id in ids.items()}
        self._renamed = _renamed(tokenizer, added.values(), self._names)
        of_model = {
            token_id for text, token_id in ids.items() if tokenizer.model.token_to_id(text) is not None
        }
        self._ids_of_model = of_model - _of_model(self._renamed, _UNKNOWN)
        self._original_ids = {
            self._renamed.token_to_id(self._names.get(token.content, token.content)): token_id
            for token_id, token in added.items()
        }

    def may_be_in(self, strings: Iterable[str]) -> bool:
        """Whether one of these texts of a request has a control token in it, or may end within one."""
        if self._normalized:
            return True
        return self._risky.search("\0".join(map(str.strip, strings)) + "\0") is not None

    def are_all_in(self, parts: list[str]) -> bool:
        """Whether all control tokens that a tokenizer finds are those of `parts`: in turn a text and one."""
        if self._normalized:
            return False
        ends = list(accumulate(map(len, parts)))
        written = list(zip(ends[0::2], ends[1::2], strict=False))
        return written == [found.span() for found in self._any.finditer("".join(parts))]

    def encode(self, parts: list[str]) -> list[int]:
        """Token ids of a chat: in turn a text, of which nothing becomes a control token, and a control token.

        Raises InvalidRequest if this tokenizer's model makes a control token of the text nevertheless.
        """
        named = "".join(self._names[part] if at % 2 else part for at, part in enumerate(parts))
        ids = self._renamed.encode_batch_fast([named], add_special_tokens=False)[0].ids
        if not self._ids_of_model.isdisjoint(ids):
            raise InvalidRequest("this model cannot read the text of its control tokens as text", "messages")
        return [self._original_ids.get(token, token) for token in ids]


def _spelled_or_begun(texts: set[str]) -> re.Pattern[str]:
    """What finds one of `texts`, or the first character of one so close to \\0 that it may be begun there."""
    if not texts:
        return NOTHING
    firsts = "".join(re.escape(char) for char in sorted({text[0] for text in texts}))
    begun = rf"[{firsts}][^\0]{{0,{max(map(len, texts))}}}\0"
    return re.compile(f"{expression(texts)}|{begun}")


def _renamed(tokenizer: Tokenizer, added: Iterable[AddedToken], names: dict[str, str]) -> Tokenizer:
    """A tokenizer with the same model that finds its control tokens by other names, under other ids."""
    renamed = Tokenizer(tokenizer.model)  # shares the vocabulary
    if tokenizer.normalizer is not None:
        renamed.normalizer = tokenizer.normalizer
    steps = []
    if tokenizer.pre_tokenizer is not None:
        renamed.pre_tokenizer = tokenizer.pre_tokenizer
        steps = [tokenizer.pre_tokenizer]
    whole = [text for text in names if tokenizer.token_to_id(text) in _of_model(renamed, text)]
    if whole:  # Unigram: the model itself takes the text for its token, unless that comes in two words
        cut = Regex("|".join(f"{re.escape(text[0])}(?={re.escape(text[1:])})" for text in whole))
        renamed.pre_tokenizer = pre_tokenizers.Sequence([*steps, pre_tokenizers.Split(cut, "isolated")])
    renamed.add_tokens([_with_name(token, names.get(token.content, token.content)) for token in added])
    return renamed


def _with_name(token: AddedToken, name: str) -> AddedToken:
    flags = {flag: getattr(token, flag) for flag in ("single_word", "lstrip", "rstrip", "normalized")}
    return AddedToken(name, special=token.special, **flags)


def _of_model(renamed: Tokenizer, text: str) -> set[int]:
    """The tokens that the model makes of a text, alone and between others."""
    return {token for probe in (text, f"a{text} ") for token in renamed.encode(probe).ids}
