"""One connection of a client that sends bytes and reads what comes, and does not wait for ever."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from urllib.parse import urlsplit

from tests.fuzz.findings import Findings

_QUIET_S = 0.4  # the server waits for the rest of a request, or there is none to answer
_END_S = 10.0
_AT_ONCE = 16
_HEAD = re.compile(rb"^HTTP/1\.1 (\d{3}) .*?\r\n(.*?)\r\n\r\n", re.MULTILINE | re.DOTALL)
_LENGTH = re.compile(rb"^content-length: (\d+)", re.MULTILINE)


@dataclass(frozen=True)
class Answered:
    """What a server said to what it was sent."""

    sent: bytes
    answer: bytes
    hung: bool

    def wrong_statuses(self) -> list[int]:
        """Every 5xx but a deliberate 503."""
        return [
            int(head[1])
            for head in _HEAD.finditer(self.answer)
            if head[1].startswith(b"5") and not (head[1] == b"503" and b"retry-after:" in head[2])
        ]


async def exchange_all(url: str, requests: list[bytes], findings: Findings) -> None:
    """Send each on a connection of its own, several at once, and count what is wrong."""
    at_once = asyncio.Semaphore(_AT_ONCE)

    async def one(sent: bytes) -> Answered:
        async with at_once:
            return await _exchange(url, sent)

    for answered in await asyncio.gather(*map(one, requests)):
        findings.http += 1
        wrong = answered.wrong_statuses()
        findings.unexpected_5xx += len(wrong)
        findings.hangs += answered.hung
        if wrong or answered.hung:
            findings.tell(f"{wrong or 'no end'}: {answered.sent[:400]!r} -> {answered.answer[:300]!r}")


async def _exchange(url: str, sent: bytes) -> Answered:
    address = urlsplit(url)
    reader, writer = await asyncio.open_connection(address.hostname, address.port)
    answer = b""
    hung = False
    try:
        writer.write(sent)
        while not _is_whole(answer):
            piece = await asyncio.wait_for(reader.read(1 << 16), _END_S if _waits(sent, answer) else _QUIET_S)
            if not piece:
                break
            answer += piece
    except TimeoutError:
        pass  # the request has no end
    except ConnectionError:
        return Answered(sent, answer, hung)  # the server has had enough
    try:
        if not reader.at_eof():
            writer.write_eof()
            answer += await asyncio.wait_for(reader.read(), _END_S)
    except TimeoutError:
        hung = True
    except ConnectionError:
        pass  # closed while something was still to be read
    finally:
        writer.transport.abort()
    return Answered(sent, answer, hung)


def _waits(sent: bytes, answer: bytes) -> bool:
    """Whether the answer may take a while: a correct request may be computed, a stream has begun."""
    return b"text/event-stream" in answer[:500] or (
        not answer and sent.count(b"HTTP/1.1") == 1 and _is_whole(sent)
    )


def _is_whole(data: bytes) -> bool:
    """Whether it is one message whose Content-Length holds, or a stream at its end."""
    head, border, body = data.partition(b"\r\n\r\n")
    if not border:
        return False
    lengths = _LENGTH.findall(head.lower())
    return body.endswith(b"0\r\n\r\n") if not lengths else lengths == [b"%d" % len(body)]
