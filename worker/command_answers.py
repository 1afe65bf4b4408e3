"""CommandAnswers: commands that are repeated until they are answered are carried out once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from wire.messages.any_message import AnyMessage
from wire.messages.caches import CacheCleared, TenantForgotten

_KEPT = 64

Answer = TypeVar("Answer", CacheCleared, TenantForgotten)
CommandKey = tuple[str, int]
"""The sender's mailbox, and the token of the command."""


class CommandAnswers(Generic[Answer]):
    """The last answers to one kind of command. Engine loop's thread only."""

    def __init__(self, send: Callable[[str, AnyMessage], None]) -> None:
        self._send = send
        self._answers: OrderedDict[CommandKey, Answer | None] = OrderedDict()  # None: under way

    def is_new(self, key: CommandKey) -> bool:
        """Whether to carry the command out. A repeat is answered like the first, if that is answered."""
        if key in self._answers:
            answer = self._answers[key]
            if answer is not None:
                self._send(key[0], answer)
            return False
        self._answers[key] = None
        if len(self._answers) > _KEPT:
            self._answers.popitem(last=False)
        return True

    def answer(self, key: CommandKey, answer: Answer) -> None:
        """The command has been carried out."""
        if key in self._answers:
            self._answers[key] = answer
        self._send(key[0], answer)
