"""Kimi's tokenizers give the ids that tiktoken gives from the same file."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from common.tokenizer_file import KIMI_WORDS, NAMES, byte_alphabet, tokenizer_json
from router.text.tokenization import Tokenization
from tests.support.tokenizers import byte_level

NAMED = {"[EOS]": 1, "<|im_end|>": 2, "<think>": 22}
"""Tokens that tokenizer_config.json names, by their places behind the others; the last is not special."""


def ranks_of(directory: Path) -> dict[bytes, int]:
    """All bytes, and tokens of a trained vocabulary, in the order of their merges."""
    model = json.loads((byte_level(directory) / NAMES[0]).read_text())["model"]
    alphabet = byte_alphabet()
    tokens = [bytes([byte]) for byte in range(256)]
    for pair in model["merges"]:
        joined = "".join(pair if isinstance(pair, list) else pair.split(" "))
        tokens.append(bytes(alphabet[char] for char in joined))
    return {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict[bytes, int]:
    return ranks_of(tmp_path_factory.mktemp("trained"))


def write(directory: Path, ranks: dict[bytes, int], name: str = "TikTokenTokenizer") -> Path:
    lines = [b"%s %d" % (base64.b64encode(token), rank) for token, rank in ranks.items()]
    (directory / NAMES[1]).write_bytes(b"\n".join(lines) + b"\n")
    added = {
        str(len(ranks) + place): {"content": text, "special": text != "<think>"}
        for text, place in NAMED.items()
    }
    config = {"tokenizer_class": name, "added_tokens_decoder": added, "eos_token": "[EOS]"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"model_type": "kimi_k2"}))
    return directory


@pytest.fixture(scope="module")
def pair(
    ranks: dict[bytes, int], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenization, tiktoken.Encoding]:
    special = {f"<|reserved_token_{len(ranks) + place}|>": len(ranks) + place for place in range(256)}
    named = {place: text for text, place in NAMED.items()}
    special = {named.get(token - len(ranks), text): token for text, token in special.items()}
    theirs = tiktoken.Encoding("kimi", pat_str=KIMI_WORDS, mergeable_ranks=ranks, special_tokens=special)
    return Tokenization(write(tmp_path_factory.mktemp("kimi"), ranks)), theirs


TEXTS = st.lists(
    st.one_of(
        st.text(max_size=20),
        st.sampled_from(["the quick", " brown's", "中文分词", "東京 tower", "123456", "\r\n\n ", "  x", "İ"]),
        st.sampled_from(["\u0303", "ﬁ", "ǅ", "ʰ", "한국어", "ا١٢"]),
        st.sampled_from([*NAMED, "<|im_"]),
    ),
    max_size=8,
).map("".join)


@given(text=TEXTS)
def test_ids_and_texts_are_tiktokens(pair: tuple[Tokenization, tiktoken.Encoding], text: str) -> None:
    ours, theirs = pair
    ids = theirs.encode(text, allowed_special="all")
    assert ours.encode(text) == ours.tokenizer.encode(text).ids == ids
    assert ours.decode(ids) == text


def test_tokens_behind_the_others_have_their_places(pair: tuple[Tokenization, tiktoken.Encoding]) -> None:
    ours, theirs = pair
    added = ours.added_ids()
    assert len(added) == 256
    assert added == theirs._special_tokens
    assert ours.vocab_size == theirs.n_vocab
    assert ours._tiktoken is not None, "the library takes four times as long"
    assert ours.special_tokens == {"eos_token": "[EOS]"}
    words = theirs.encode("Hi<think>[EOS]", allowed_special="all")
    assert ours.decode(words, skip_special_tokens=True) == "Hi<think>"


def test_tokenizer_json_comes_first(ranks: dict[bytes, int], tmp_path: Path) -> None:
    whole = (byte_level(write(tmp_path, ranks)) / NAMES[0]).read_text("utf-8")
    assert tokenizer_json(tmp_path) == whole


def test_what_is_no_file_of_kimi_is_refused(ranks: dict[bytes, int], tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        tokenizer_json(tmp_path)
    write(tmp_path, ranks, name="QWenTokenizer")
    with pytest.raises(ValueError, match="tokenizer_class is 'QWenTokenizer'"):
        tokenizer_json(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(ValueError, match="tokenizer_class is None"):
        tokenizer_json(tmp_path)
    write(tmp_path, {token: 2 * rank for token, rank in ranks.items()})
    with pytest.raises(ValueError, match="each once"):
        tokenizer_json(tmp_path)
    (tmp_path / NAMES[1]).write_text("no base64 here")
    with pytest.raises(ValueError, match="no token and its id"):
        tokenizer_json(tmp_path)


def test_every_token_is_its_own_bytes(pair: tuple[Tokenization, tiktoken.Encoding]) -> None:
    ours, theirs = pair
    library: Tokenizer = ours.tokenizer
    assert library.get_vocab_size(with_added_tokens=False) == theirs.n_vocab - 256
    for token in range(256, theirs.n_vocab - 256):
        text = theirs.decode_single_token_bytes(token).decode("utf-8", errors="ignore")
        if text.encode() == theirs.decode_single_token_bytes(token):
            assert ours.decode([token]) == text
