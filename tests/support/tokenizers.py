"""Tiny tokenizers of the families' two kinds, with chat templates, and larger ones, as model directories."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

_CORPUS = [
    "The quick brown fox jumps over the lazy dog. Hello, world! How are you today?",
    "def add(a: int, b: int) -> int:\n    return a + b\n",
    "Grüße aus München – naïve café, 東京 and Ελλάδα 🙂",
    "user assistant system tool 0123456789",
]

# More scripts than the documents have, for tokenizers that are trained on these.
_SCRIPTS = [
    "Съешь же ещё этих мягких французских булок, да выпей чаю.",
    "東京都は日本の首都です。中文分词很难，１２３。한국어도 있다.",
    "مرحبا بالعالم ١٢٣، नमस्ते दुनिया १२३। ภาษาไทย",
    "🙂🙃👩‍👩‍👧 🇩🇪 ❤️ cafe\u0301 ﬁ",
    "\n".join(" " * depth + "if x:\r\n\n" for depth in range(24)),
]

LLAMA_3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
O200K_SPLIT = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

CHATML = """{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0].role == 'system' %}{{ messages[0].content + '\\n\\n' }}{%- endif %}
{{- '# Tools\\n' }}
{%- for tool in tools %}{{ tool | tojson }}{{ '\\n' }}{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'user' %}{%- set ns.last = loop.index0 %}{%- endif %}
{%- if message.role not in ['system', 'user', 'assistant', 'tool'] %}
{{- raise_exception('unknown role ' + message.role) }}
{%- endif %}
{{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
{%- if message.reasoning_content is defined %}
{{- '<think>' + message.reasoning_content + '</think>' }}
{%- endif %}
{%- if message.tool_calls %}{{ message.tool_calls | tojson(indent=2) }}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}"""

INST = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] %}{% set loop_messages = messages[1:] %}
{% else %}{% set system = '' %}{% set loop_messages = messages %}{% endif %}
{% for message in loop_messages %}
{%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}
{% endif %}
{% if message['role'] == 'user' %}
{%- set before = system + '\\n\\n' if loop.first and system else '' %}
{{ '[INST] ' + before + message['content'].strip() + ' [/INST]' }}
{% else %}
{% generation %}{{ ' ' + message['content'] + eos_token }}{% endgeneration %}
{% endif %}{% if loop.index > 100 %}{% break %}{% endif %}
{% endfor %}"""


def byte_level(path: Path, bos: bool = False, tokenizer_class: str = "PreTrainedTokenizerFast") -> Path:
    """Like Qwen's (no bos) or Llama 3's (bos by the post-processor)."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    specials = ["<|begin|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False), AddedToken("</think>", normalized=False)])
    config: dict[str, Any] = {"eos_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    if bos:
        config["bos_token"] = "<|begin|>"
        start = tokenizer.token_to_id("<|begin|>")
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", start)]
        )
    template = ("{{ bos_token }}" if bos else "") + CHATML
    return _write(path, tokenizer, {**config, "chat_template": template, "tokenizer_class": tokenizer_class})


def trained(path: Path, split: str, ignore_merges: bool) -> Path:
    """A byte-level tokenizer of 3,000 tokens, trained on this repository's documents.

    With `ignore_merges` as Llama 3's: its list of merges has every two tokens that join to a token, and
    merges do not reach all tokens.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=3000, initial_alphabet=alphabet, show_progress=False)
    pages = sorted((Path(__file__).parents[2] / "docs").glob("*.md"))
    tokenizer.train_from_iterator([*(page.read_text() for page in pages), *_SCRIPTS * 20], trainer)
    if ignore_merges:
        tokenizer.model = _take_words_whole(json.loads(tokenizer.to_str())["model"]["vocab"])
    specials = ["<|begin|>", "<|im_start|>", "<|im_end|>"]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    start = tokenizer.token_to_id("<|begin|>")
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", start)]
    )
    return _write(path, tokenizer, {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"})


def _take_words_whole(vocab: dict[str, int]) -> models.BPE:
    whole = ["ĠbatonXYZ", "Thatthe", "ÐŁÑĢÐ¸Ð²ÐµÑĤÑĤ", "ĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠĠ"]
    vocab = vocab | {name: len(vocab) + at for at, name in enumerate(whole)}
    merges = [
        (name[:cut], name[cut:])
        for name in sorted(vocab, key=vocab.__getitem__)
        for cut in range(1, len(name))
        if name[:cut] in vocab and name[cut:] in vocab
    ]
    return models.BPE(vocab, merges, ignore_merges=True)


def byte_fallback(path: Path, tokenizer_class: str = "PreTrainedTokenizerFast") -> Path:
    """Like Llama 2's and Mistral's: metaspace, bytes where the vocabulary ends, bos by configuration."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{value:02X}>" for value in range(256))]
    characters = sorted({char for text in _CORPUS[:2] for char in text.replace(" ", "\u2581")} - {"\n"})
    trained = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False)
    trained.train_from_iterator([text.replace(" ", "\u2581") for text in _CORPUS[:2]], trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) if isinstance(pair, list) else tuple(pair.split(" ")) for pair in model["merges"]]
    merges = [pair for pair in merges if "\n" not in pair[0] + pair[1]]
    merged = [left + right for left, right in merges]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys([*pieces, *characters, *merged]))}
    bpe = models.BPE(vocabulary, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens(
        [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    )
    config = {
        "bos_token": {"content": "<s>", "__type": "AddedToken"},
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "add_bos_token": True,
        "add_eos_token": False,
        "tokenizer_class": tokenizer_class,
        "added_tokens_decoder": {
            str(len(vocabulary)): {"content": "<extra>", "special": True, "normalized": False}
        },
    }
    _write(path, tokenizer, config)
    (path / "chat_template.jinja").write_text(INST, encoding="utf-8")
    return path


def _write(path: Path, tokenizer: Tokenizer, config: dict[str, Any]) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
    return path
