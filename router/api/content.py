"""The content of a request's body: its type, and its bytes, unpacked and bounded while they come."""

from __future__ import annotations

import zlib

from common.errors import BodyTooLarge, InvalidRequest, UnsupportedMedia

# curl and urllib name the last two where nobody says the type.
_TYPES = ("application/json", "text/plain", "application/x-www-form-urlencoded")
_GZIP = 16 + zlib.MAX_WBITS


def check_type(content_type: str | None) -> None:
    """Raises UnsupportedMedia for a type that is not JSON."""
    if content_type is None:
        return
    named = content_type.partition(";")[0].strip().lower()
    if named not in _TYPES and not named.endswith("+json"):
        raise UnsupportedMedia(f"the body's type is {named[:64]!r}: application/json is needed")


class UnpackedContent:
    """The bytes of one body, `most` of them at most."""

    def __init__(self, encoding: str | None, most: int) -> None:
        """`encoding` is the header's. Raises UnsupportedMedia for any but gzip."""
        named = (encoding or "identity").strip().lower()
        if named not in ("identity", "gzip", "x-gzip"):
            raise UnsupportedMedia(f"the body's encoding is {named[:64]!r}: gzip, or none, is taken")
        self._unpack = None if named == "identity" else zlib.decompressobj(_GZIP)
        self._most = most
        self._parts: list[bytes] = []
        self._size = 0

    def add(self, part: bytes) -> None:
        """The next bytes as they came. Raises BodyTooLarge, and InvalidRequest for what is not gzip."""
        if self._unpack is not None:
            try:
                part = self._unpack.decompress(part, self._most - self._size + 1)
            except zlib.error as error:
                raise InvalidRequest(f"the body is not gzip: {error}") from None
        self._size += len(part)
        self.expect(self._size)
        self._parts.append(part)

    def expect(self, size: int) -> None:
        """Raises BodyTooLarge for a body of so many bytes, packed or not."""
        if size > self._most:
            raise BodyTooLarge(f"the body has more than {self._most} bytes")

    def whole(self) -> bytes:
        """All bytes. Raises InvalidRequest if they break off."""
        if self._unpack is not None and (not self._unpack.eof or self._unpack.unused_data):
            raise InvalidRequest("the body is not one whole gzip stream")
        return self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
