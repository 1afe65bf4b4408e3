"""Tiny seeded models of every supported family, saved so that the served stack can load them.

Every parameter is random, norms and biases too: a bias that a fast path forgets is invisible at zero.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    Mistral4Config,
    Mistral4ForCausalLM,
    PretrainedConfig,
    PreTrainedModel,
)

from engine.published_names import register_names
from tests.support import text_models
from tests.support.tiny_configs import COMMON, FAMILIES, MIXED, SIMILAR, VOCAB_SIZE

register_names()
text_models.register_all()
# transformers leaves it out, and takes no class of its own without `exist_ok`.
AutoModelForCausalLM.register(Mistral4Config, Mistral4ForCausalLM, exist_ok=True)

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tiny(family: str, directory: Path, seed: int) -> Path:
    """The directory of the tiny model (family, seed) under `directory`, written unless it exists."""
    path = directory / f"{family}-{seed}"
    if path.is_dir():
        return path
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory) as unfinished:
        made = Path(unfinished) / "model"
        write_tiny({**FAMILIES, **MIXED, **SIMILAR}[family](), made, seed)
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
    """Every parameter normal with deviation 0.1; norm weights around where they start: 1, or 0 if 1 is added.

    The layers' matrices are twice that and tied embeddings a fifth: otherwise the last token outweighs the
    context, and greedy decoding runs into a short cycle that hides wrong KV. Recurrent states decay slowly,
    for a state that is soon forgotten hides which one it was.
    """
    generator = torch.Generator().manual_seed(seed)
    tied = getattr(model.config, "tie_word_embeddings", False)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            centre = float(parameter.flatten()[0])
            parameter.normal_(0.0, 0.1, generator=generator)
            kind = name.rpartition(".")[2]
            if kind in _SPREAD:
                mean, deviation = _SPREAD[kind]
                parameter.mul_(deviation / 0.1).add_(mean)
            elif parameter.ndim == 1 and not name.endswith("bias"):
                parameter.add_(centre)
            if name.endswith(_SHARP) or (centre == 0 and name.endswith(("q_norm.weight", "k_norm.weight"))):
                parameter.add_(1.0)
            if centre == 0 and name.endswith(("indexer.q_norm.weight", "indexer.k_norm.weight")):
                parameter.mul_(2.0)  # MiniMax-M3's choices depend on the order of its norms' weights
            if parameter.ndim > 1 and ".layers." in name:
                parameter.mul_(2.0)
            if parameter.ndim == 3 and "conv" in name:
                parameter.mul_(2.5)  # few taps
            if tied and "embed_tokens" in name:
                parameter.mul_(0.2)
        for name, buffer in sorted(model.named_buffers()):
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                buffer.normal_(0.0, 0.1, generator=generator)
            if name.endswith("rotary_emb.alpha"):  # Mistral Large 4's frequencies
                buffer.normal_(0.0, 0.3, generator=generator)
            if name.endswith("tid2eid"):  # DeepSeek-V4's experts of each token
                of_token = torch.rand(len(buffer), model.config.n_routed_experts, generator=generator)
                buffer.copy_(of_token.topk(buffer.shape[1]).indices)
            if name.endswith("layer_scalar"):
                buffer.normal_(1.0, 0.1, generator=generator)
            if name.endswith("act_fn.beta"):
                buffer.normal_(0.5, 0.1, generator=generator)


_SHARP = ("q_layernorm.weight", "k_layernorm.weight")
"""With those around 2, attention is sharp where few layers attend: no page is lost in the mean of many."""
_SPREAD = {"A_log": (-3.0, 1.0), "dt_bias": (0.0, 1.0), "sinks": (1.0, 1.0)}
"""Last part of a parameter's name -> its mean and deviation."""


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
        "model_max_length": COMMON["max_position_embeddings"],
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
