"""Tiny seeded models of every supported family, saved so that the served stack can load them.

Every parameter is random, norms and biases too: a bias that a fast path forgets is invisible at zero.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
    Qwen3MoeConfig,
)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
VOCAB_SIZE = 320  # 256 bytes, 3 special tokens, 61 pairs of letters: every id a model can sample has a text
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "initializer_range": 0.1,
    "bos_token_id": None,
    "eos_token_id": 258,
    "pad_token_id": None,
    "tie_word_embeddings": False,
}
_YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 512,
}
_LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 256,
}

FAMILIES: dict[str, Callable[[], PretrainedConfig]] = {
    "llama": lambda: LlamaConfig(**_COMMON),
    "llama_bias": lambda: LlamaConfig(**_COMMON, attention_bias=True, mlp_bias=True, rope_parameters=_LLAMA3),
    "llama_yarn": lambda: LlamaConfig(**{**_COMMON, "num_key_value_heads": 4}, rope_parameters=_YARN),
    "mistral": lambda: MistralConfig(**_COMMON, sliding_window=None),
    "qwen2": lambda: Qwen2Config(**{k: v for k, v in _COMMON.items() if k != "head_dim"}),
    "qwen3": lambda: Qwen3Config(**{**_COMMON, "head_dim": 32, "tie_word_embeddings": True}),
    "qwen3_moe": lambda: Qwen3MoeConfig(
        **_COMMON, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=48, mlp_only_layers=[1]
    ),
}
"""Families and variants; the part before "_" is not always the model_type."""


def make_tiny(family: str, directory: Path, seed: int) -> Path:
    """The directory of the tiny model (family, seed) under `directory`, written unless it exists."""
    path = directory / f"{family}-{seed}"
    if path.is_dir():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as unfinished:
        made = Path(unfinished) / "model"
        write_tiny(FAMILIES[family](), made, seed)
        try:
            os.rename(made, path)
        except OSError:  # another process has just written the same model
            assert path.is_dir()
    return path


def write_tiny(config: PretrainedConfig, path: Path, seed: int) -> None:
    """A model of `config`, random from `seed`, with tokenizer and generation config."""
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    randomise(model, seed)
    model.generation_config = GenerationConfig(eos_token_id=config.eos_token_id)
    model.save_pretrained(path)
    write_tokenizer(path)


def randomise(model: PreTrainedModel, seed: int) -> None:
    """Every parameter normal with deviation 0.1; norm weights (one-dimensional, not biases) around 1.

    The layers' matrices are twice that and tied embeddings a fifth: otherwise the last token outweighs the
    context, and greedy decoding runs into a short cycle that hides wrong KV.
    """
    generator = torch.Generator().manual_seed(seed)
    tied = model.config.tie_word_embeddings
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            parameter.normal_(0.0, 0.1, generator=generator)
            if parameter.ndim == 1 and not name.endswith("bias"):
                parameter.add_(1.0)
            if parameter.ndim > 1 and ".layers." in name:
                parameter.mul_(2.0)
            if tied and "embed_tokens" in name:
                parameter.mul_(0.2)


def write_tokenizer(path: Path) -> None:
    """Bytes, special tokens and some pairs of letters, VOCAB_SIZE in all; a ChatML template."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = "etaoinsr"
    pairs = [(a, b) for a in letters for b in letters][: VOCAB_SIZE - len(alphabet) - len(SPECIAL_TOKENS)]
    vocab = [*alphabet, *SPECIAL_TOKENS, *(a + b for a, b in pairs)]
    tokenizer = Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(vocab)}, merges=pairs))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer.save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": _COMMON["max_position_embeddings"],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
