"""Functions for the router's option private_prompt_hook."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
from pathlib import Path

SECRET_WORD = "password"
HOOK_PIPE = "BATON_TEST_HOOK_PIPE"  # the environment variable that names it
_STUCK = threading.Event()  # nobody sets it


def by_word(tenant: str, prompt: str, tokens: list[int]) -> int | None:
    """Private from page 1 on for a text with the word; other words ask for other answers."""
    assert isinstance(tenant, str)
    assert all(isinstance(token, int) for token in tokens)
    if "fails" in prompt:
        raise ValueError("it fails")
    if "times out" in prompt:
        raise TimeoutError("something of its own")
    if "exits" in prompt:
        sys.exit(1)
    if "is cancelled" in prompt:
        raise asyncio.CancelledError
    if "hangs" in prompt:
        _STUCK.wait()
    if "nonsense" in prompt:
        return "page one"  # type: ignore[return-value]
    if "negative" in prompt:
        return -1
    return 1 if SECRET_WORD in prompt else None


def when_told(tenant: str, prompt: str, tokens: list[int]) -> int | None:
    """Nothing is private. A prompt with the token 0 waits for a byte in a named pipe."""
    if 0 in tokens:
        with Path(os.environ[HOOK_PIPE]).open("rb", buffering=0) as pipe:
            pipe.read(1)
    return None
