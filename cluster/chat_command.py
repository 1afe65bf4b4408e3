"""The command `baton chat`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time

from cluster.load.api_client import API_KEY, AnswerFailed, ApiClient, TimedAnswer, text_of
from common.host import HTTP_PORT, LOOPBACK

HELP = (
    "Chat with the model of a server with OpenAI's API. Each line is a message; /new begins a new chat, "
    "Ctrl-D ends. What comes from a pipe is one message. The API key is read from OPENAI_API_KEY."
)
_DIM, _PLAIN = "\x1b[2m", "\x1b[0m"


def add_arguments(chat: argparse.ArgumentParser) -> None:
    """Its arguments."""
    chat.add_argument(
        "url",
        metavar="URL",
        nargs="?",
        default=f"http://{LOOPBACK}:{HTTP_PORT}",
        help="of the server (default: %(default)s)",
    )
    chat.add_argument("--model", help="its name there (default: the first of /v1/models)")
    chat.add_argument("--system", help="a system message")
    chat.add_argument("--max-tokens", type=int, help="of an answer")
    chat.add_argument("--temperature", type=float, help="(default: the model's)")
    chat.set_defaults(run=_chat)


def _chat(arguments: argparse.Namespace) -> int:
    chat = _Chat(arguments)
    if not sys.stdin.isatty():
        return 0 if asyncio.run(chat.say(sys.stdin.read())) else 1
    with contextlib.suppress(ImportError):
        import readline  # noqa: F401 (input() edits lines with it)
    while True:
        try:
            line = input("> ")
        except EOFError:
            print()
            return 0
        if line.strip() == "/new":
            chat = _Chat(arguments)
        elif line.strip():
            asyncio.run(chat.say(line))


class _Chat:
    """The messages so far."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        """Raises ConfigError when no server is there."""
        self._url: str = arguments.url
        fields = {"max_tokens": arguments.max_tokens, "temperature": arguments.temperature}
        self._fields = {name: value for name, value in fields.items() if value is not None}
        self._fields["model"] = arguments.model or asyncio.run(self._only_model())
        self._messages: list[dict[str, str]] = []
        if arguments.system:
            self._messages.append({"role": "system", "content": arguments.system})

    async def say(self, text: str) -> bool:
        """Print the answer to one more message as it comes. False if there is no whole one; then the message
        is forgotten."""
        messages = [*self._messages, {"role": "user", "content": text}]
        answer = TimedAnswer(time.perf_counter())
        said, is_terminal = "", sys.stdout.isatty()
        async with self._client() as client:
            try:
                body = {**self._fields, "messages": messages}
                async for choice in client.stream("/v1/chat/completions", body, answer):
                    reasoning, text = text_of(choice)
                    said += text
                    if is_terminal and reasoning:
                        print(f"{_DIM}{reasoning}{_PLAIN}", end="", flush=True)
                    print(text, end="", flush=True)
            except AnswerFailed as failure:
                print(f"\nbaton: {failure}", file=sys.stderr)
                return False
        print(f"\n{_DIM}{_facts(answer)}{_PLAIN}" if is_terminal else "")
        self._messages = [*messages, {"role": "assistant", "content": said}]
        return True

    def _client(self) -> ApiClient:
        return ApiClient(self._url, os.environ.get(API_KEY))

    async def _only_model(self) -> str:
        async with self._client() as client:
            return await client.only_model()


def _facts(answer: TimedAnswer) -> str:
    first = answer.piece_times[0] - answer.sent_at if answer.piece_times else 0.0
    return (
        f"{answer.prompt_tokens} prompt tokens, {answer.cached_tokens} of them cached; first token after "
        f"{1000 * first:.0f} ms; {answer.output_tokens} tokens in {answer.ended_at - answer.sent_at:.2f} s"
    )
