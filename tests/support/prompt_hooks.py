"""Functions for the router's option private_prompt_hook."""

from __future__ import annotations

import asyncio
import sys
import threading

SECRET_WORD = "password"
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
