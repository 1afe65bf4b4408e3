"""Token ids by tiktoken are those of the tokenizers library; where that is not sure, tiktoken is not used."""

from __future__ import annotations

import json
import random
import socket
import sys
import unicodedata
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import tiktoken
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers

from bench.make_model import byte_tokenizer
from router.text.tiktoken_encoder import CHARACTERS, LONGEST, TiktokenEncoder
from router.text.tiktoken_tables import split_pattern
from router.text.tokenization import Tokenization
from tests.support.tokenizers import LLAMA_3_SPLIT, O200K_SPLIT, byte_fallback, byte_level, trained

ROOT = Path(__file__).parents[3]
TEXTS_OF_EACH = 3000  # random ones; seven tokenizers
_ADDED = [
    AddedToken("<|im_start|>user", normalized=False),  # begins as another one does
    AddedToken("<tool call>", normalized=False),
    AddedToken("<mask>", normalized=False, lstrip=True),
    AddedToken("NORM\u00e9", normalized=True),
]


def _shape_m(path: Path) -> Path:
    byte_tokenizer().save_pretrained(path)
    return path


MODELS: dict[str, Callable[[Path], Path]] = {
    "demo": lambda _: ROOT / "deploy/demo_model",
    "shape-m": _shape_m,
    "gpt2": byte_level,
    "bos": partial(byte_level, bos=True),
    "qwen": partial(byte_level, tokenizer_class="Qwen2Tokenizer"),
    "llama3": partial(trained, split=LLAMA_3_SPLIT, ignore_merges=True),
    "o200k": partial(trained, split=O200K_SPLIT, ignore_merges=False),
}


@cache
def tokenizer(kind: str) -> Tokenizer:
    """The model's, with more added tokens."""
    with TemporaryDirectory() as directory:
        made: Tokenizer = Tokenization(MODELS[kind](Path(directory))).tokenizer
    made.add_tokens(_ADDED)
    return made


@cache
def encoder(kind: str) -> TiktokenEncoder:
    made = TiktokenEncoder.make(tokenizer(kind))
    assert made is not None, f"tiktoken does not stand in for {kind}"
    return made


@cache
def words() -> list[str]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return " ".join(page.read_text() for page in pages).split(" ")


_PIECES = [
    "'s", "'LL", "'ſ", "don't", "  ", "    ", "\n\n", "\r\n", "\t ", "\x1c", "\x0b", "\x00", "1234", "3.14",
    "Hello", " the", "naïve", "cafe\u0301", "e\u0301\u0327", "\u1100\u1161\u11a8", "Привет, мир", "東京都",
    "\u3000", "中文。", "مرحبا بالعالم", "नमस्ते", "ไทย", "🙂", "👩\u200d👩\u200d👧", "🇩🇪", "\u200d", "\ufeff",
    "ﬁ", "ŉ", "\u212b", "１２３", "Ⅷ", "²", "<|im_start|>", "<|im_end|>", "user", "<think>", "<tool call>",
    "<|endoftext|>", "<w300>", "x" * 300, "=" * 80,
]  # fmt: skip


def random_text(rng: random.Random) -> str:
    """Words of the documents, the pieces above and characters of all kinds, one after another."""

    def piece() -> str:
        kind = rng.random()
        if kind < 0.3:
            return " " * (rng.random() < 0.7) + rng.choice(words())
        if kind < 0.55:
            return rng.choice(_PIECES)
        if kind < 0.7:
            return rng.choice(CHARACTERS) * rng.choice((1, 1, 2, 3, 17))
        if kind < 0.85:
            return "".join(rng.choice(CHARACTERS) for _ in range(rng.randint(1, 8)))
        points = (rng.randrange(0x110000) if rng.random() < 0.2 else rng.randrange(0x3000) for _ in range(4))
        return "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)

    return "".join(piece() for _ in range(rng.randint(0, 20)))


@pytest.mark.parametrize("kind", MODELS)
def test_ids_of_random_texts_are_the_librarys(kind: str) -> None:
    rng = random.Random(f"tokens of {kind}")
    texts = [random_text(rng) for _ in range(TEXTS_OF_EACH)]
    for special in (True, False):
        wanted = tokenizer(kind).encode_batch_fast(texts, add_special_tokens=special)
        for text, want in zip(texts, wanted, strict=True):
            assert encoder(kind).encode(text, add_special_tokens=special) == want.ids, repr(text)


_TEXT = st.lists(
    st.one_of(
        st.text(st.characters(codec="ascii"), max_size=6),
        st.text(max_size=4),
        st.sampled_from(_PIECES),
        st.sampled_from(["<mask>", "NORM\u00e9", "NORMe\u0301"]),
    ),
    max_size=12,
).map("".join)


@pytest.mark.parametrize("kind", MODELS)
@given(text=_TEXT, special=st.booleans())
def test_ids_are_the_librarys_or_there_are_none(kind: str, text: str, special: bool) -> None:
    got = encoder(kind).encode(text, add_special_tokens=special)
    if got is None:
        assert "<mask>" in text or "NORM" in text
    else:
        assert got == tokenizer(kind).encode(text, add_special_tokens=special).ids


def test_added_tokens_that_take_spaces_or_are_normalised_are_left_to_the_library() -> None:
    for text in ("a <mask>", "a NORM\u00e9", "a NORMe\u0301"):
        assert encoder("gpt2").encode(text, add_special_tokens=True) is None
    assert encoder("gpt2").encode("NORM", add_special_tokens=True) is not None


@pytest.mark.parametrize("kind", ["gpt2", "llama3", "o200k"])
@pytest.mark.parametrize("piece", [" ", "\n", "a", "A", "!", "1", "東", " \n"])
def test_a_very_long_word_is_encoded_and_a_longer_one_left_to_the_library(kind: str, piece: str) -> None:
    long = piece * (LONGEST // len(piece))
    assert encoder(kind).encode(long, add_special_tokens=False) == (
        tokenizer(kind).encode_batch_fast([long], add_special_tokens=False)[0].ids
    )
    assert encoder(kind).encode(piece * (LONGEST + 1), add_special_tokens=False) is None


def test_threads_may_share_an_encoder() -> None:
    rng = random.Random(5)
    texts = [random_text(rng) for _ in range(400)]
    made = encoder("demo")
    with ThreadPoolExecutor(4) as pool:
        got = list(pool.map(partial(made.encode, add_special_tokens=True), texts))
    assert got == [one.ids for one in tokenizer("demo").encode_batch_fast(texts)]


def test_nothing_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a connection was opened")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    assert TiktokenEncoder.make(tokenizer("demo")) is not None


def changed(path: Path, change: Callable[[dict[str, Any]], object]) -> Tokenizer:
    """The tokenizer of a byte-level model after a change of its file."""
    file = json.loads((byte_level(path) / "tokenizer.json").read_text())
    change(file)
    return Tokenizer.from_str(json.dumps(file))


def add_tokens(file: dict[str, Any], merges: list[tuple[str, str]]) -> None:
    model = file["model"]
    for left, right in merges:
        model["vocab"].setdefault(left + right, 1000 + len(model["merges"]))
        model["merges"].append([left, right])


def put_out_of_order(file: dict[str, Any]) -> None:
    """The id of the last merge's token and that of the first change places."""
    vocab = file["model"]["vocab"]
    first, last = ("".join(file["model"]["merges"][at]) for at in (0, -1))
    vocab[first], vocab[last] = vocab[last], vocab[first]


def put_out_of_reach(file: dict[str, Any]) -> None:
    """`zx` joins before `qz` does, so the two that would make `qzx` are never neighbours."""
    add_tokens(file, [("z", "x"), ("q", "z"), ("qz", "x")])


def ignore_merges_with_one_missing(file: dict[str, Any]) -> None:
    put_out_of_reach(file)
    file["model"]["ignore_merges"] = True


def ignore_merges_with_all(file: dict[str, Any]) -> None:
    put_out_of_reach(file)
    add_tokens(file, [("q", "zx")])
    file["model"]["ignore_merges"] = True


def lose_a_byte(file: dict[str, Any]) -> None:
    """Of characters in no text."""
    del file["model"]["vocab"]["\u00ff"]


@pytest.mark.parametrize("change", [lambda file: None, ignore_merges_with_all])
def test_a_tokenizer_of_which_tiktoken_does_the_same_is_taken(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    made = changed(tmp_path, change)
    ours = TiktokenEncoder.make(made)
    assert ours is not None
    for text in ("qzx", " qzx qz zx", "aqzxzxq"):
        assert ours.encode(text, add_special_tokens=True) == made.encode(text).ids


@pytest.mark.parametrize(
    "change",
    [
        lambda file: file.update(normalizer={"type": "Lowercase"}),
        lambda file: file.update(normalizer={"type": "NFKC"}),
        lambda file: file["pre_tokenizer"].update(add_prefix_space=True),
        lambda file: file["pre_tokenizer"].update(use_regex=False),
        lambda file: file.update(pre_tokenizer=None),
        lambda file: file["model"].update(dropout=0.1),
        ignore_merges_with_one_missing,
        lose_a_byte,
        put_out_of_order,
        put_out_of_reach,
    ],
)
def test_what_tiktoken_does_not_do_is_left_to_the_library(
    tmp_path: Path, change: Callable[[dict[str, Any]], object]
) -> None:
    assert TiktokenEncoder.make(changed(tmp_path, change)) is None


def test_other_kinds_of_tokenizers_are_left_to_the_library(tmp_path: Path) -> None:
    assert TiktokenEncoder.make(Tokenizer.from_file(str(byte_fallback(tmp_path) / "tokenizer.json"))) is None
    word_level = Tokenizer(models.WordLevel({"a": 0}, unk_token="a"))
    word_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    assert TiktokenEncoder.make(word_level) is None


def _split(regex: str, **changes: Any) -> dict[str, Any]:
    split = {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}
    to_bytes = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    return {"type": "Sequence", "pretokenizers": [{**split, **changes}, to_bytes]}


@pytest.mark.parametrize("pattern", [LLAMA_3_SPLIT, O200K_SPLIT, r"\p{L}+|[^\s]"])
def test_a_pattern_that_means_the_same_is_taken(pattern: str) -> None:
    assert split_pattern(_split(pattern)) == pattern


@pytest.mark.parametrize(
    "pattern",
    [
        r"\p{Greek}+", r"\w+", r"\h", r"[a-z&&[^b]]+", r"[]a]+", r"[[ab]c]", r"^a", r"a$", r"a.b", r"a++",
        r"a+?", r"(a)b", r"(a", r"\p{N}{1,3}+", r"(?<=a)b", r"(?!a)b", r"\s+(?!\S)", r"\Qa", r"é+", r"(?>a)",
        r"\bfoo",
    ],
)  # fmt: skip
def test_a_pattern_that_may_mean_something_else_is_not_taken(pattern: str) -> None:
    assert split_pattern(_split(pattern)) is None


def test_pre_tokenizers_that_do_more_than_a_split_are_not_taken() -> None:
    assert split_pattern(_split("a", behavior="MergedWithNext")) is None
    assert split_pattern(_split("a", invert=True)) is None
    assert split_pattern(_split("a", pattern={"String": "a"})) is None
    twice = _split("a")
    twice["pretokenizers"].insert(0, twice["pretokenizers"][0])
    assert split_pattern(twice) is None
    assert split_pattern({"type": "Sequence", "pretokenizers": []}) is None


@pytest.mark.parametrize("pattern", [r"\p{L}+", r"\p{L}+|\p{N}+|\s+", r"\p{L}+|[^\p{L}\s]+| \p{L}"])
def test_a_pattern_that_leaves_characters_between_words_is_not_taken(tmp_path: Path, pattern: str) -> None:
    made = changed(tmp_path, lambda file: file.update(pre_tokenizer=_split(pattern)))
    assert TiktokenEncoder.make(made) is None


def test_probed_characters_are_of_every_category() -> None:
    everything = {unicodedata.category(chr(point)) for point in range(sys.maxunicode + 1)}
    assert {unicodedata.category(char) for char in CHARACTERS} == everything - {"Cs"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "group",
    [
        *(r"\p{L}", r"\p{N}", r"\p{M}", r"\s", r"(?i:s)"),
        *(
            pytest.param(rf"\p{{{one}}}", marks=pytest.mark.invariants)
            for one in ("Lu", "Ll", "Lt", "Lm", "Lo")
        ),
    ],
)
def test_both_engines_put_every_character_into_the_same_groups(group: str) -> None:
    every = [chr(point) for point in range(sys.maxunicode + 1) if not 0xD800 <= point < 0xE000]
    ranks = {bytes([value]): value for value in range(256)}
    encoding = tiktoken.Encoding("group", pat_str=group, mergeable_ranks=ranks, special_tokens={})
    ours = set(bytes(encoding.encode_ordinary("".join(every))).decode())
    without = normalizers.Replace(Regex(group), "")
    rest: set[str] = set()
    for at in range(0, len(every), 512):
        rest |= set(without.normalize_str("".join(every[at : at + 512])))
    assert ours == set(every) - rest
