"""An independent reader of KV events and of a tree's report: zmq, msgpack and hashlib, none of our code.

Tests hold it against a worker's tree: what the two say must be the same pages.
"""

from __future__ import annotations

import hashlib
import struct
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import msgpack
import zmq

_END = -1


class Page(NamedTuple):
    """A cached page: the page before it (None: the first of its prompt) and its tokens."""

    parent: int | None
    tokens: tuple[int, ...]


class Replay:
    """A DEALER on a replay socket, as vLLM's subscriber has one."""

    def __init__(self, address: str, timeout_ms: int = 10_000) -> None:
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.linger = 0
        self._socket.rcvtimeo = timeout_ms
        self._socket.rcvhwm = 0
        self._socket.connect(address)

    def send(self, start: int) -> None:
        """Ask for every batch from number `start` on."""
        self._socket.send_multipart([b"", struct.pack(">Q", start)])

    def receive(self) -> dict[int, bytes]:
        """Sequence number -> batch, one whole answer."""
        batches: dict[int, bytes] = {}
        while True:
            *_, number, payload = self._socket.recv_multipart()
            (sequence,) = struct.unpack(">q", number)
            if sequence == _END:
                return batches
            batches[sequence] = payload

    def ask(self, start: int) -> dict[int, bytes]:
        """Send, and receive."""
        self.send(start)
        return self.receive()

    def close(self) -> None:
        self._context.destroy(linger=0)

    def __enter__(self) -> Replay:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def replayed(address: str, start: int = 0, timeout_ms: int = 10_000) -> dict[int, bytes]:
    """Sequence number -> batch, from number `start` on, as the replay socket gives them."""
    with Replay(address, timeout_ms) as replay:
        return replay.ask(start)


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

    def apply(self, batches: dict[int, bytes], first: int = 0) -> None:
        """Events in order. One that contradicts an earlier one, or a wrong hash, is an error."""
        assert list(batches) == list(range(first, first + len(batches))), "every batch, in order"
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
                    case "AllBlocksCleared":
                        self.held.clear()
                    case kind:
                        raise AssertionError(f"an event nobody asked for: {kind}")

    def _store(self, event: dict[str, Any]) -> None:
        names, parent, tokens, size = (
            event[key] for key in ("block_hashes", "parent_block_hash", "token_ids", "block_size")
        )
        assert len(tokens) == len(names) * size
        assert parent is None or parent in self.held
        keys = event.get("extra_keys")
        assert keys is None or (len(keys) == len(names) and all(key == keys[0] for key in keys))
        extra_key = keys[0][0] if keys else ""
        digest = self._digests[parent] if parent is not None else None
        chain = Chain(self.model, extra_key, event.get("cache_salt") or "", digest)
        for i, name in enumerate(names):
            page = tuple(tokens[i * size : (i + 1) * size])
            assert chain.add(page) == name
            assert name not in self.held, "stored twice"
            self.held[name] = Page(parent, page)
            self._digests[name] = chain.digest
            parent = name


class Chain:
    """The page hashes of one prompt, in order."""

    def __init__(self, model: str, extra_key: str, cache_salt: str, digest: bytes | None = None) -> None:
        """Continue after `digest`; None: from the namespace's own."""
        parts = (part.encode() for part in (model, extra_key, cache_salt))
        seed = b"".join(struct.pack("<I", len(part)) + part for part in parts)
        self.digest = digest or hashlib.sha256(b"baton-kv-1" + seed + b"\0").digest()

    def add(self, page: tuple[int, ...]) -> int:
        """The event hash of the next page."""
        self.digest = hashlib.sha256(self.digest + struct.pack(f"<{len(page)}i", *page)).digest()
        (name,) = struct.unpack(">q", self.digest[:8])
        return int(name)


def pages_of(nodes: list[dict[str, Any]], model: str, page_size: int) -> dict[int, Page]:
    """The pages of a worker's tree (its report "nodes"), each under the name that its tokens give it."""
    return _read(nodes, model, page_size)[0]


def pages_by_medium(nodes: list[dict[str, Any]], model: str, page_size: int) -> dict[str, set[int]]:
    """The names of the pages that a worker's tree says it has in each medium."""
    names = iter(_read(nodes, model, page_size)[0])  # in the order of the nodes
    held: dict[str, set[int]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
    for node in nodes:
        own = [next(names) for _ in range(len(node["tokens"]) // page_size)]
        for medium in node["media"]:
            held[medium].update(own)
    return held


def ends_of(nodes: list[dict[str, Any]], model: str, page_size: int) -> list[int]:
    """The name of each node's last page."""
    return [name for name, _ in _read(nodes, model, page_size)[1]]


def _read(
    nodes: list[dict[str, Any]], model: str, page_size: int
) -> tuple[dict[int, Page], list[tuple[int, bytes]]]:
    """All pages, and of every node its last page's name and digest."""
    pages: dict[int, Page] = {}
    ends: list[tuple[int, bytes]] = []
    for node in nodes:
        above, digest = ends[node["parent"]] if node["parent"] >= 0 else (None, None)
        chain = Chain(model, node["extra_key"], node["cache_salt"], digest)
        tokens = node["tokens"]
        assert tokens, "a node without pages"
        assert len(tokens) % page_size == 0
        for start in range(0, len(tokens), page_size):
            page = tuple(tokens[start : start + page_size])
            name = chain.add(page)
            assert name not in pages, "one page on two nodes"
            pages[name] = Page(above, page)
            above = name
        assert above is not None
        ends.append((above, chain.digest))
    return pages, ends
