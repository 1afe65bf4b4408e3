"""PrivatePromptHook: asks a function of the operator's from which page on a prompt is private for ever.

    def hook(tenant: str, prompt: str, tokens: list[int]) -> int | None

`prompt` is the text of the tokens, with the chat template's; None: nothing in it has to be private. The
function is called on a thread of its own, and waited for no longer than a bound. Without an answer the whole
prompt is private: when it fails, answers something else, or takes too long. A pool of threads was rejected:
Python waits for its threads when a process ends, so one stuck call would keep it.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import threading
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry

from common.errors import ConfigError
from router.measures import Count

log = logging.getLogger(__name__)

_AT_ONCE = 16  # calls; others wait for their turn, within their time
_WHOLE = 0  # the page from which on a prompt is private as a whole


class PrivatePromptHook:
    """Belongs to one event loop."""

    def __init__(self, name: str, bound_s: float, registry: CollectorRegistry) -> None:
        """`name` is module:function; "": there is no hook. Raises ConfigError if it cannot be imported."""
        self._function = _load(name) if name else None
        self._bound_s = bound_s
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._counts = Count(
            registry, "baton_router_private_prompt_hook",
            "Prompts of which the hook was asked: open, private, failed or late (private, too)", "outcome",
        )  # fmt: skip

    async def private_from(
        self, tenant: str, tokens: list[int], decode: Callable[[list[int]], str]
    ) -> int | None:
        """The page from which on a prompt is private, if the hook says so. `decode` makes its text."""
        function = self._function
        if function is None:
            return None
        outcome = "late"
        page: int | None = _WHOLE
        try:
            async with asyncio.timeout(self._bound_s):
                answer = await self._call(lambda: function(tenant, decode(tokens), tokens))
            outcome = "failed"
            if answer is None:
                outcome, page = "open", None
            elif isinstance(answer, int) and not isinstance(answer, bool) and answer >= 0:
                outcome, page = "private", answer
            else:
                log.warning("private_prompt_hook: %r is no page", answer)
        except TimeoutError:
            log.warning("private_prompt_hook: no answer in %g s", self._bound_s)
        except Exception as error:  # noqa: BLE001  it is the operator's code
            outcome = "failed"
            log.warning("private_prompt_hook: %s: %s", type(error).__name__, error)
        self._counts.inc(1, outcome)
        return page

    async def _call(self, call: Callable[[], Any]) -> Any:
        """What `call` returns or raises, on a thread. Its place is free again when it has really ended."""
        await self._room.acquire()
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[Any] = loop.create_future()

        def ended(value: Any, error: Exception | None) -> None:
            self._room.release()
            if answer.done():  # nobody waits any more
                return
            if error is None:
                answer.set_result(value)
            else:
                answer.set_exception(error)

        def work() -> None:
            value: Any = None
            failure: Exception | None = None
            try:
                value = call()
            except TimeoutError as error:  # not to be taken for ours
                failure = RuntimeError(f"it timed out: {error}")
            except Exception as error:  # noqa: BLE001  raised where the answer is awaited
                failure = error
            except BaseException as error:  # noqa: BLE001  an exit ends neither the thread nor who awaits it
                failure = RuntimeError(f"it raised {error!r}")
            if not loop.is_closed():
                loop.call_soon_threadsafe(ended, value, failure)

        try:
            threading.Thread(target=work, name="private prompt hook", daemon=True).start()
        except RuntimeError:  # the machine has no thread for it
            self._room.release()
            raise
        return await answer


def _load(name: str) -> Callable[..., Any]:
    module, _, function = name.partition(":")
    try:
        found: Any = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError("private_prompt_hook", f"{name!r}: {error}", "give module:function") from None
    if not callable(found):
        raise ConfigError("private_prompt_hook", f"{name!r} cannot be called", "name a function")
    hook: Callable[..., Any] = found
    return hook
