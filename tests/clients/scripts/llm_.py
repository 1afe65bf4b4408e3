"""llm, the command line program: a prompt, one that is streamed, a schema."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from common import LONG, MODEL, QUESTION, TOKENS, URL, WEATHER, check_text, check_weather

with tempfile.TemporaryDirectory() as home:
    entry = {
        "model_id": "baton", "model_name": MODEL, "api_base": f"{URL}/v1", "api_key_name": "none",
        "supports_schema": True, "supports_tools": True,
    }  # fmt: skip
    Path(home, "extra-openai-models.yaml").write_text(json.dumps([entry]))  # JSON is YAML

    def llm(*arguments: str) -> str:
        """Its output."""
        done = subprocess.run(
            [sys.executable, "-m", "llm", *arguments], input="", capture_output=True, text=True, timeout=120,
            env={**os.environ, "LLM_USER_PATH": home, "OPENAI_API_KEY": "none"},
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    options = ("-m", "baton", "-o", "temperature", "0", "-o", "max_tokens", str(TOKENS))
    said = llm(*options, "--no-stream", QUESTION)
    check_text(said)
    assert llm(*options, QUESTION) == said
    check_weather(
        llm(
            "-m",
            "baton",
            "-o",
            "max_tokens",
            str(LONG),
            "--no-stream",
            "--schema",
            json.dumps(WEATHER),
            QUESTION,
        )
    )
