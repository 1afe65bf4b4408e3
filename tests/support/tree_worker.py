"""A worker's cache and its KV event publisher, without an engine: the tree is what consumers must know.

Run as a program it is such a worker in a process of its own: it says its addresses, then obeys one command a
line from standard input, and answers each with the pages of its tree.
"""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from common.secrets import ClusterSecret, secret_in_use
from kvcache.config import KVEventsConfig
from kvcache.layout import GroupSpec
from kvcache.memory import Memory
from kvcache.publisher import EventPublisher
from kvcache.tenancy.config import TenancyConfig
from kvcache.tree_node import TreeNode
from tests.kvcache.support import SPEC, memory, put
from wire.page_hash import event_hashes, owned_digests

NO_SHARING = TenancyConfig()


class TreeWorker:
    """Turns happen in the caller's thread; one of ours gives snapshots, as an idle engine loop does."""

    def __init__(
        self,
        buffer_batches: int = 10_000,
        page_size: int = 4,
        pages: int = 4096,
        specs: Sequence[GroupSpec] = (SPEC,),
        max_queued_events: int = 100_000,
        secret: ClusterSecret | None = None,
        tenancy: TenancyConfig = NO_SHARING,
        buffer_bytes: int = KVEventsConfig.buffer_bytes,
    ) -> None:
        self._secret = secret
        config = KVEventsConfig(
            True,
            buffer_batches=buffer_batches,
            buffer_bytes=buffer_bytes,
            max_queued_events=max_queued_events,
            secret=secret,
        )
        self.memory = memory(page_size, pages, specs=specs, events=config, tenancy=tenancy)
        self.deaf = False  # as an engine in a long forward: no snapshot is given
        self._wanted = threading.Event()
        self._closing = False
        self._lock = threading.Lock()
        self.publisher = EventPublisher(config, None, self._wanted.set)
        public, private = self.publisher.public, self.publisher.private
        self.addresses = {  # as in a worker's record
            "events": public.address, "replay": public.replay_address,
            "private_events": private.address, "private_replay": private.replay_address,
        }  # fmt: skip
        self._thread = threading.Thread(target=self._give_snapshots, daemon=True)
        self._thread.start()

    @contextmanager
    def turn(self) -> Iterator[Memory]:
        """Change the tree; what that did is published as one batch."""
        with self._lock:
            yield self.memory
            self._publish()

    def put(self, tokens: Iterable[int], tenant: str = "") -> None:
        """Cache a sequence; one batch."""
        with self.turn():
            self.put_silently(tokens, tenant)

    def put_silently(self, tokens: Iterable[int], tenant: str = "") -> None:
        """Within a turn."""
        put(self.memory, tokens, tenant=tenant)

    def evict(self, tokens: int) -> None:
        """Make room; one batch."""
        with self.turn() as built:
            built.cache.tree.evict("full", -(-tokens // built.page_size))

    def pages(self) -> set[int]:
        """The names of what the tree holds, under the lock: all of it has been published."""
        return self.public_pages() | self.private_pages()

    def public_pages(self) -> set[int]:
        """Those of public pages."""
        return self._names(lambda node: not node.tenant)

    def private_pages(self) -> set[int]:
        """Those of private pages."""
        return self._names(lambda node: bool(node.tenant))

    def _names(self, chosen: Callable[[TreeNode], bool]) -> set[int]:
        size, secret = self.memory.page_size, secret_in_use(self._secret)
        with self._lock:
            return {
                name
                for node in filter(chosen, self.memory.cache.tree.nodes())
                for name in event_hashes(owned_digests(node.page_digests(size), node.tenant, secret))
            }

    def close(self) -> None:
        self._closing = True
        self._wanted.set()
        self._thread.join(5.0)
        self.publisher.close()

    def __enter__(self) -> TreeWorker:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _publish(self) -> None:
        self.publisher.publish(*self.memory.take_events())
        if self.publisher.snapshot_wanted and not self.deaf:
            self.publisher.publish_snapshot(*self.memory.snapshot())

    def _give_snapshots(self) -> None:
        while not self._closing:
            self._wanted.wait()
            self._wanted.clear()
            with self._lock:
                self._publish()


def say(answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Lines of JSON: `{"put": [tokens], "tenant": name}` or `{"evict": tokens}` in, the tree's pages out."""
    with TreeWorker(buffer_batches=int(sys.argv[1])) as worker:
        say(worker.addresses)
        for line in sys.stdin:
            command = json.loads(line)
            if "put" in command:
                worker.put(command["put"], command.get("tenant", ""))
            else:
                worker.evict(command["evict"])
            say(sorted(worker.pages()))


if __name__ == "__main__":
    main()
