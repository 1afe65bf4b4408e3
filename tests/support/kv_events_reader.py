"""An independent reader of KV events and of a printed tree: plain zmq, msgpack and hashlib, none of our code.

Tests hold it against a worker's tree: what the two say must be the same pages.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import msgpack
import zmq

_END = -1
_NODE = re.compile(r"^((?:  )+)(\d+) tokens \[([\d ]*)(?: \.\.\.)?\] lock=(\d+) hits=\d+$")


class Page(NamedTuple):
    """A cached page: the page before it (None: the first of its prompt) and its tokens."""

    parent: int | None
    tokens: tuple[int, ...]


def replayed(address: str, start: int = 0, timeout_ms: int = 10_000) -> dict[int, bytes]:
    """Sequence number -> batch, from number `start` on, as the replay socket gives them."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.rcvtimeo = timeout_ms
        socket.connect(address)
        socket.send_multipart([b"", struct.pack(">q", start)])
        batches: dict[int, bytes] = {}
        while True:
            *_, number, payload = socket.recv_multipart()
            (sequence,) = struct.unpack(">q", number)
            if sequence == _END:
                return batches
            batches[sequence] = payload


def waiting(subscriber: zmq.Socket[bytes]) -> dict[int, bytes]:
    """Sequence number -> batch that a SUB socket has received and nobody has read."""
    batches = {}
    while subscriber.poll(200):
        _, number, payload = subscriber.recv_multipart()
        batches[struct.unpack(">q", number)[0]] = payload
    return batches


@dataclass
class Pages:
    """What a worker holds, by its events."""

    model: str
    held: dict[int, Page] = field(default_factory=dict)
    removed: int = 0
    _digests: dict[int, bytes] = field(default_factory=dict)

    def apply(self, batches: dict[int, bytes]) -> None:
        """Events in order. One that contradicts an earlier one, or a wrong hash, is an error."""
        assert list(batches) == list(range(len(batches))), "every batch from the first, in order"
        for payload in batches.values():
            _, events, _ = msgpack.unpackb(payload)
            for event in events:
                match event["type"]:
                    case "BlockStored":
                        self._store(event)
                    case "BlockRemoved":
                        for name in event["block_hashes"]:
                            del self.held[name]
                            self.removed += 1
                    case kind:
                        raise AssertionError(f"an event nobody asked for: {kind}")

    def _store(self, event: dict[str, object]) -> None:
        names, parent, tokens, size = (
            event[key] for key in ("block_hashes", "parent_block_hash", "token_ids", "block_size")
        )
        assert isinstance(names, list)
        assert isinstance(tokens, list)
        assert isinstance(size, int)
        assert parent is None or isinstance(parent, int)
        assert len(tokens) == len(names) * size
        assert parent is None or parent in self.held
        for i, name in enumerate(names):
            page = tuple(tokens[i * size : (i + 1) * size])
            before = self._digests[parent] if parent is not None else self._seed()
            digest = hashlib.sha256(before + struct.pack(f"<{size}i", *page)).digest()
            assert struct.unpack(">q", digest[:8]) == (name,)
            assert name not in self.held, "stored twice"
            self.held[name] = Page(parent, page)
            self._digests[name] = digest
            parent = name

    def _seed(self) -> bytes:
        """Of the namespace without salt and extra key."""
        parts = b"".join(struct.pack("<I", len(part)) + part for part in (self.model.encode(), b"", b""))
        return hashlib.sha256(b"baton-kv-1" + parts + b"\0").digest()


def check_tree(printed: str, held: dict[int, Page], page_size: int) -> None:
    """Assert that a printed tree holds exactly these pages, in this shape.

    The print shows every node's length and first tokens (the first page must be among them). Whatever is not
    shown follows: inside a node no page may have two successors.
    """
    children: dict[int | None, dict[tuple[int, ...], int]] = defaultdict(dict)
    for name, page in held.items():
        children[page.parent][page.tokens] = name
    head, *lines = printed.splitlines()
    assert head.startswith(f"{len(held) * page_size} tokens cached")
    seen: set[int] = set()
    path: list[int | None] = [None]  # the last page of every node from the root to where we are
    for line in lines:
        match = _NODE.match(line)
        assert match is not None, line
        depth, tokens = len(match[1]) // 2, tuple(map(int, match[3].split()))
        del path[depth:]
        last = _walk(children, path[-1], tokens[:page_size], int(match[2]) // page_size, seen)
        path.append(last)
    assert seen == set(held)


def _walk(
    children: dict[int | None, dict[tuple[int, ...], int]],
    parent: int | None,
    first: Iterable[int],
    pages: int,
    seen: set[int],
) -> int:
    """Follow a node of `pages` pages from its first page on; its last page."""
    name = children[parent][tuple(first)]
    seen.add(name)
    for _ in range(pages - 1):
        (name,) = children[name].values()
        seen.add(name)
    return name
