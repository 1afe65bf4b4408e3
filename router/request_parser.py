"""RequestParser: reads HTTP/1.1 for a server that takes up no other protocol.

With any request a client may offer one: Java's HttpClient offers HTTP/2 with each first one of a connection.
A server that does not want it answers as if nothing had been offered (RFC 9110, 7.8). But httptools takes
every offer: it ends such a request with its head, and leaves the body to the other protocol. So another
parser goes on behind the head.
"""

from __future__ import annotations

from httptools import HttpParserUpgrade, HttpRequestParser
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_FRAMING = (b"content-length", b"transfer-encoding")


class RequestParser:
    """In the place of `HttpToolsProtocol.parser`. httptools calls what begins with `on_`."""

    def __init__(self, protocol: HttpToolsProtocol) -> None:
        self._protocol = protocol
        self.on_message_begin, self.on_url = protocol.on_message_begin, protocol.on_url
        self.on_header, self.on_headers_complete = protocol.on_header, protocol.on_headers_complete
        self.on_body = protocol.on_body
        self._parser = _make_parser(self)

    def feed_data(self, data: bytes) -> None:
        """Call the protocol's methods. Raises HttpParserError."""
        while data:
            try:
                self._parser.feed_data(data)
            except HttpParserUpgrade as offered:
                (read,) = offered.args
                data = data[read:]
                self._go_on_behind_head()
            else:
                return

    def get_http_version(self) -> str:
        """Of the request whose head is complete."""
        return self._parser.get_http_version()

    def get_method(self) -> bytes:
        """Of the request whose head is complete."""
        return self._parser.get_method()

    def should_keep_alive(self) -> bool:
        """Whether the client may send another request after it."""
        return self._parser.should_keep_alive()

    def should_upgrade(self) -> bool:
        """Whether another protocol is offered."""
        return self._parser.should_upgrade()

    def on_message_complete(self) -> None:
        """The end of a request. Where another protocol is offered, the first call is too early."""
        if not self._parser.should_upgrade():
            self._protocol.on_message_complete()

    def _go_on_behind_head(self) -> None:
        """The protocol has had a head. What a new parser needs of it is how its body ends."""
        behind = _BehindHead(self)
        self._parser = _make_parser(behind)
        framing = b"".join(b"%b: %b\r\n" % (n, v) for n, v in self._protocol.headers if n in _FRAMING)
        self._parser.feed_data(b"POST / HTTP/1.1\r\n" + framing + b"\r\n")
        behind.begun = True


class _BehindHead:
    """Calls a RequestParser, but for the first head."""

    def __init__(self, parser: RequestParser) -> None:
        self.begun = False
        self._parser = parser
        self.on_body = parser.on_body
        self.on_message_complete = parser.on_message_complete

    def on_message_begin(self) -> None:
        if self.begun:
            self._parser.on_message_begin()

    def on_url(self, url: bytes) -> None:
        if self.begun:
            self._parser.on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.begun:
            self._parser.on_header(name, value)

    def on_headers_complete(self) -> None:
        if self.begun:
            self._parser.on_headers_complete()


def _make_parser(protocol: RequestParser | _BehindHead) -> HttpRequestParser:
    parser = HttpRequestParser(protocol)
    parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn: pipelined requests are read
    return parser
