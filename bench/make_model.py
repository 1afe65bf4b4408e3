"""Write shape M, the model of every bench: `python -m bench.make_model DIR`.

Qwen3-0.6B's shape with a vocabulary of 32,768 and tied embeddings: 474 M parameters, seeded bfloat16 noise,
948 MB. It comes with a byte-level tokenizer and a chat template, so that any server loads the same files.
"""

from __future__ import annotations

from pathlib import Path

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedTokenizerFast, Qwen3Config

from common.arguments import ExactParser

VOCAB_SIZE = 32_768
SEED = 20_260_101
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def shape_m() -> Qwen3Config:
    """Shape M's configuration."""
    return Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=40_960,
        rms_norm_eps=1e-6,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=258,
        pad_token_id=256,
        dtype=torch.bfloat16,
    )


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """256 byte tokens, three special tokens, and `<wN>` so that every id of the vocabulary has a text."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {symbol: i for i, symbol in enumerate(alphabet)}
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    for text in [*specials, *(f"<w{i}>" for i in range(len(alphabet) + len(specials), VOCAB_SIZE))]:
        vocab[text] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in specials])
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", model_max_length=40_960
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def make_model(
    directory: Path, config: PretrainedConfig | None = None, device: str | torch.device = "cpu"
) -> None:
    """Write config, weights and tokenizer into `directory`, unless it has them. The weights are drawn on
    `device`: on a GPU those of an 8B model take a second, on a CPU minutes."""
    if (directory / "model.safetensors").exists() and (directory / "tokenizer.json").exists():
        return
    torch.manual_seed(SEED)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = AutoModelForCausalLM.from_config(config or shape_m())
    finally:
        torch.set_default_dtype(default)
    model.generation_config.eos_token_id = model.config.eos_token_id
    model.save_pretrained(directory)
    byte_tokenizer().save_pretrained(directory)


def main() -> None:
    """Command line."""
    parser = ExactParser(description="Write the bench model into a directory.")
    parser.add_argument("directory", type=Path)
    directory = parser.parse_args().directory
    make_model(directory)
    print(directory)


if __name__ == "__main__":
    main()
