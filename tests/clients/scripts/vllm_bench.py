"""vllm bench serve: completions and chats of random tokens; every request of it succeeds.

Its code is called, not the program `vllm`, which asks for a distribution of that name: the build for CPUs has
another one.
"""

from __future__ import annotations

import argparse
import os

from vllm.benchmarks.serve import add_cli_args, main

from common import MODEL, URL

for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
    parser = argparse.ArgumentParser()
    add_cli_args(parser)
    arguments = parser.parse_args(
        [
            "--backend", backend, "--base-url", URL, "--endpoint", path, "--model", MODEL,
            "--tokenizer", os.environ["BATON_MODEL_FILES"], "--dataset-name", "random",
            "--random-input-len", "32", "--random-output-len", "8", "--num-prompts", "8", "--ignore-eos",
            "--max-concurrency", "4",
        ]
    )  # fmt: skip
    result = main(arguments)
    assert result["completed"] == 8, result
    assert result["total_output_tokens"] == 64, result
