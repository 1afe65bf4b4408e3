"""Text to token ids, and chats to text, with the results of transformers' AutoTokenizer.

transformers itself is not imported: its Auto classes load torch, which costs a router seconds and a gigabyte.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from common.errors import ConfigError, InvalidRequest
from common.tokenizer_file import NAMES, load_tokenizer
from router.text.chat import Chat
from router.text.chat_template import ChatTemplate, load_templates, template_text
from router.text.control_tokens import ControlTokens
from router.text.detokenize import DetokenizerFactory
from router.text.json_files import read_json
from router.text.tiktoken_encoder import TiktokenEncoder
from router.text.tokenizer_classes import rebuild, rebuilt_class, special_defaults

_MOST_NORMALIZED = 4  # bytes of a text for each that is left of it
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenization:
    """A model directory's tokenizer and chat template."""

    def __init__(self, model: Path, chat_template: str | None = None) -> None:
        """`chat_template`: a file or its text, instead of the model's own. Raises ConfigError if there is no
        such file, or the directory has no usable tokenizer."""
        config = read_json(model / "tokenizer_config.json")
        self.tokenizer = _read(model)
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        model_type = read_json(model / "config.json").get("model_type")
        rebuilt = rebuilt_class(self.tokenizer, config.get("tokenizer_class") or "", model_type)
        rebuild(self.tokenizer, rebuilt, config)
        self.special_tokens = {
            **{name: text for name, text in special_defaults(rebuilt).items() if name not in config},
            **_named_tokens(config, read_json(model / "special_tokens_map.json")),
        }
        _add_missing_tokens(self.tokenizer, config, self.special_tokens)
        self.vocab_size: int = self.tokenizer.get_vocab_size(with_added_tokens=True)
        self.detokenizers = DetokenizerFactory(self.tokenizer)
        # A normalizer shortens a text: NFC makes one syllable of 3 bytes of Korean letters of 9.
        shrinks = 1 if self.tokenizer.normalizer is None else _MOST_NORMALIZED
        self.longest_token_bytes = shrinks * self.detokenizers.longest_token_bytes
        self._tiktoken = TiktokenEncoder.make(self.tokenizer)
        sources = load_templates(model, config)
        if chat_template is not None:
            sources = {"default": template_text(chat_template)}
        listed: list[str] | None = config.get("chat_control_tokens")
        self.templates = "\0".join(sources.values())
        named_in = self.templates if listed is None else listed
        self._control_tokens = control = ControlTokens(self.tokenizer, named_in)
        self._template = ChatTemplate(sources, self.special_tokens, control.marks) if sources else None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of plain text, with the model's bos/eos when its tokenizer adds them. Any thread."""
        ids = self._tiktoken.encode(text, add_special_tokens) if self._tiktoken is not None else None
        if ids is None:
            # encode gives the same ids, with offsets, and takes a third longer.
            ids = self.tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        return ids

    def decode(self, tokens: list[int], skip_special_tokens: bool = False) -> str:
        """Text of token ids. Raises InvalidRequest for an id outside the vocabulary."""
        for token in tokens:
            if not 0 <= token < self.vocab_size:
                raise InvalidRequest(f"token {token} is not in the vocabulary of {self.vocab_size}", "tokens")
        text: str = self.tokenizer.decode(tokens, skip_special_tokens=skip_special_tokens)
        return text

    def vocabulary_texts(self, tokens: list[int]) -> list[str]:
        """The tokens as the vocabulary writes them: a space may be "Ġ", and a character several tokens."""
        return [str(self.tokenizer.id_to_token(token)) for token in tokens]

    def added_ids(self) -> dict[str, int]:
        """The tokens that are taken out of a text before all others, by their texts."""
        tokens = self.tokenizer.get_added_tokens_decoder().items()
        return {token.content: token_id for token_id, token in tokens}

    def render_chat(self, chat: Chat) -> str:
        """The chat as text. Raises InvalidRequest if the template refuses it, or if there is none."""
        if self._template is None:
            raise InvalidRequest("this model has no chat template; use /v1/completions", "messages")
        return self._template.render(chat)

    def encode_chat(self, chat: Chat, check: Callable[[str], None] | None = None) -> list[int]:
        """Token ids of the rendered chat. Control tokens are the template's only: where the request spells
        one, it stays text. Any thread. Raises InvalidRequest, and what `check` raises for the rendered
        chat."""
        rendered = self.render_chat(chat)
        if check is not None:
            check(rendered)
        template, control = self._template, self._control_tokens
        assert template is not None
        spelled = control.may_be_in(chat.strings)
        if not spelled and template.is_plain(chat):
            return self.encode(rendered, add_special_tokens=False)
        parts = template.separate(chat, rendered)
        if parts is None and spelled:
            raise InvalidRequest(
                "the text of a control token in these messages cannot be told from the chat template's",
                "messages",
            )
        if parts is None or control.are_all_in(parts):
            return self.encode(rendered, add_special_tokens=False)
        return control.encode(parts)


def _read(model: Path) -> Tokenizer:
    try:
        return load_tokenizer(model)
    except FileNotFoundError:
        raise ConfigError(
            "model", f"{model} has no {' or '.join(NAMES)}", "name a model directory that has one"
        ) from None
    except Exception as error:  # noqa: BLE001  the library raises bare Exception for a bad file
        raise ConfigError("model", f"{model} has no usable tokenizer ({error})", "repair it") from None


def _content(token: Any) -> str | None:
    """The text of a special token, which is written as a string or as an object with `content`."""
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) else None


def _named_tokens(config: dict[str, Any], legacy: dict[str, Any]) -> dict[str, str]:
    """bos_token and the like, by name; from special_tokens_map.json (`legacy`) if `config` has none."""
    found = {}
    for name in _NAMED_TOKENS:
        value = _content(config[name]) if name in config else _content(legacy.get(name))
        if value is not None:
            found[name] = value
    return found


def _added_token(entry: dict[str, Any]) -> AddedToken:
    flags = {
        key: bool(entry[key]) for key in ("single_word", "lstrip", "rstrip", "normalized") if key in entry
    }
    return AddedToken(entry["content"], special=bool(entry.get("special", False)), **flags)


def _add_missing_tokens(tokenizer: Tokenizer, config: dict[str, Any], named: dict[str, str]) -> None:
    """Add the tokens that only tokenizer_config.json has, in the order of their ids, as transformers does."""
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    decoder = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(decoder.items(), key=lambda item: int(item[0])):
        if entry["content"] not in known:
            tokenizer.add_tokens([_added_token(entry)])
            known.add(entry["content"])
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or []
    listed = extra.values() if isinstance(extra, dict) else extra
    for content in [*named.values(), *(_content(token) for token in listed)]:
        if content is not None and content not in known:
            tokenizer.add_special_tokens([AddedToken(content, special=True, normalized=False)])
            known.add(content)
