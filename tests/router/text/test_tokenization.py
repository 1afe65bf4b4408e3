"""Token ids and rendered chats are transformers', for both kinds of tokenizers and each class name in use."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer

from common.errors import ConfigError, InvalidRequest
from engine.gate import FAMILIES as SERVED
from router.text.chat import Chat
from router.text.tokenization import Tokenization
from tests.support.tiny_configs import FAMILIES as TINY_FAMILIES
from tests.support.tiny_models import make_tiny
from tests.support.tokenizers import byte_fallback, byte_level

DEMO_MODEL = Path(__file__).parents[3] / "deploy" / "demo_model"


def _tiny(family: str, directory: Path) -> Path:
    return make_tiny(family, directory, seed=1)


def _of_model(
    path: Path, model_type: str, make: Callable[..., Path], tokenizer_class: str, **settings: Any
) -> Path:
    """A tokenizer with a config.json of `model_type` beside it, and more in its configuration."""
    make(path, tokenizer_class=tokenizer_class)
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    config = json.loads((path / "tokenizer_config.json").read_text()) | settings
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


FAMILIES: dict[str, Callable[[Path], Path]] = {
    "qwen": lambda path: byte_level(path, tokenizer_class="Qwen2Tokenizer"),
    "llama3": lambda path: byte_level(path, bos=True),
    "llama2": lambda path: byte_fallback(path, tokenizer_class="LlamaTokenizer"),
    "mistral": byte_fallback,
    **{
        f"{model_type}-llama2": partial(
            _of_model,
            model_type=model_type,
            make=byte_fallback,
            tokenizer_class="LlamaTokenizer",
            legacy=False,
        )
        for model_type in ("llama", "mistral", "mixtral", "phi3", "deepseek_v2")
    },
    "deepseek": partial(
        _of_model,
        model_type="deepseek_v3",
        make=byte_level,
        tokenizer_class="LlamaTokenizerFast",
        unk_token=None,
    ),
    "no-unk": partial(
        _of_model, model_type="qwen3", make=byte_level, tokenizer_class="Qwen2Tokenizer", unk_token=None
    ),
    "demo": lambda _: DEMO_MODEL,
    **{f"oracle-{family}": partial(_tiny, family) for family in TINY_FAMILIES},
}
TOOL = {
    "type": "function",
    "function": {"name": "add", "description": "a < b & 'c'", "parameters": {"type": "object"}},
}
CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hello <b>world</b> & 東京 🙂"}],
    "system": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": " Hi "}],
    "turns": [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": "b", "name": None},
        {"role": "user", "content": "c <|im_end|> </s>"},
    ],
}


@pytest.fixture(scope="module", params=FAMILIES)
def pair(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Tokenization, Any]:
    path = FAMILIES[request.param](tmp_path_factory.mktemp(request.param))
    return Tokenization(path), AutoTokenizer.from_pretrained(path)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello, world!",
        "  two  spaces",
        "naïve 東京 🙂\n\n",
        "<s> <|im_end|> <extra>",
        "<extra>a</s>b <unk>",
        "<|endoftext|>",
    ],
)
def test_text(pair: tuple[Tokenization, Any], text: str) -> None:
    ours, theirs = pair
    assert ours.encode(text) == theirs(text)["input_ids"]
    assert ours.encode(text, add_special_tokens=False) == theirs(text, add_special_tokens=False)["input_ids"]


@pytest.mark.parametrize("name", CHATS)
@pytest.mark.parametrize("prompted", [True, False])
def test_chats(pair: tuple[Tokenization, Any], name: str, prompted: bool) -> None:
    ours, theirs = pair
    want = theirs.apply_chat_template(CHATS[name], tokenize=False, add_generation_prompt=prompted)
    assert ours.render_chat(Chat(CHATS[name], add_generation_prompt=prompted)) == want
    ids = theirs.apply_chat_template(CHATS[name], add_generation_prompt=prompted)["input_ids"]
    assert ours.encode(want, add_special_tokens=False) == ids


def test_tools_reasoning_and_template_arguments(tmp_path: Path) -> None:
    path = byte_level(tmp_path)
    ours, theirs = Tokenization(path), AutoTokenizer.from_pretrained(path)
    chat: list[dict[str, Any]] = [
        {"role": "user", "content": "add 1 and 2"},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [{"é": "<1>", "b": [1, 2]}]},
        {"role": "tool", "content": "3"},
    ]
    want = theirs.apply_chat_template(
        chat, tools=[TOOL], tokenize=False, add_generation_prompt=True, enable_thinking=False
    )
    got = ours.render_chat(Chat(chat, [TOOL], template_kwargs={"enable_thinking": False}))
    assert got == want
    assert "hm" in got
    assert "<think>\n\n</think>" in got


MARKED = ["नमस्ते दुनिया", "กำลังทดสอบ", "e\u0316a\u0316 don't 12"]
"""Words with marks, which only some splits keep in one piece."""


@pytest.fixture(scope="module")
def joins_marks() -> Tokenizer:
    """Its tokens are parts of words with marks, as of Qwen 3.5."""
    tokenizer = Tokenizer(BPE())
    bytes_alone = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = Sequence([Split(" ", "isolated"), bytes_alone])
    alphabet = ByteLevel.alphabet()
    tokenizer.train_from_iterator(
        MARKED * 9, BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    )
    return tokenizer


@pytest.mark.parametrize("declared", ["Qwen2Tokenizer", "Qwen3_5Tokenizer", "PreTrainedTokenizerFast"])
@pytest.mark.parametrize(
    "model_type", ["qwen3", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "mistral3"]
)
def test_marks_are_split_as_transformers_does_for_the_model(
    joins_marks: Tokenizer, model_type: str, declared: str, tmp_path: Path
) -> None:
    joins_marks.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": declared}))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    theirs, ours = AutoTokenizer.from_pretrained(tmp_path), Tokenization(tmp_path)
    for text in MARKED:
        assert ours.tokenizer.encode(text).ids == theirs.encode(text)


@pytest.mark.parametrize(
    ("declared", "make"), [("LlamaTokenizer", byte_fallback), ("Qwen2Tokenizer", byte_level)]
)
@pytest.mark.parametrize("model_type", [one for one in sorted(SERVED) if not one.startswith("qwen")])
def test_a_class_is_rebuilt_where_transformers_does_for_the_model(
    model_type: str, declared: str, make: Callable[..., Path], tmp_path: Path
) -> None:
    """The file has a vocabulary of the declared class's kind, and does not say all that the class does."""
    path = _of_model(tmp_path, model_type, make, declared, legacy=False)
    theirs, ours = AutoTokenizer.from_pretrained(path), Tokenization(path)
    for text in ("  two  spaces", " a</s> b", "1234 it's"):
        assert ours.encode(text) == theirs(text)["input_ids"]


@pytest.mark.parametrize("family", ["qwen", "llama3", "llama2", "mistral"])
def test_a_template_may_refuse_in_its_own_words(tmp_path: Path, family: str) -> None:
    ours = Tokenization(FAMILIES[family](tmp_path))
    with pytest.raises(InvalidRequest, match=r"unknown role|roles must alternate"):
        ours.render_chat(Chat([{"role": "function", "content": "x"}]))


def rewritten(tmp_path: Path, template: str) -> Tokenization:
    path = byte_level(tmp_path)
    (path / "chat_template.jinja").write_text(template)
    return Tokenization(path)


def test_the_date_is_the_templates_to_format(tmp_path: Path) -> None:
    from datetime import datetime

    tokenization = rewritten(tmp_path, "{{ strftime_now('%Y') }}")
    assert tokenization.render_chat(Chat([{"role": "user", "content": ""}])) == datetime.now().strftime("%Y")


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.__class__.__mro__ }}",
        "{% set ns = namespace() %}{% set ns.__class__ = 1 %}",
        "{{ messages.append(1) }}",
        "{{ missing.attribute.of }}",
    ],
)
def test_the_sandbox_holds(tmp_path: Path, template: str) -> None:
    with pytest.raises(InvalidRequest, match="refused"):
        rewritten(tmp_path, template).render_chat(Chat([{"role": "user", "content": "x"}]))


def test_a_model_directory_that_cannot_work_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model: .* no tokenizer\.json"):
        Tokenization(tmp_path)
    path = byte_level(tmp_path / "m")
    (path / "chat_template.jinja").write_text("{% if %}")
    with pytest.raises(ConfigError, match="does not compile"):
        Tokenization(path)
    (path / "tokenizer_config.json").write_text(json.dumps([]))
    with pytest.raises(ConfigError, match="not a JSON object"):
        Tokenization(path)


def test_another_template_than_the_models_own(tmp_path: Path) -> None:
    path, chat = byte_level(tmp_path / "model"), Chat(CHATS["one"])
    (file := tmp_path / "other.jinja").write_text("{{ messages[0].content }}!")
    own = Tokenization(path).render_chat(chat)
    for given in (str(file), file.read_text()):
        assert Tokenization(path, given).render_chat(chat) == f"{CHATS['one'][0]['content']}!" != own
    with pytest.raises(ConfigError, match="nowhere") as refused:
        Tokenization(path, str(tmp_path / "nowhere.jinja"))
    assert refused.value.key == "chat_template"


def test_without_a_template_chat_is_refused(tmp_path: Path) -> None:
    path = byte_level(tmp_path)
    (path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(InvalidRequest, match="no chat template"):
        Tokenization(path).render_chat(Chat([{"role": "user", "content": "x"}]))
