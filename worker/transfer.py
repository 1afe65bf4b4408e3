"""PoolTransport: both sides of a worker's transport: its pools, open to writers, and its way into others.

Hand-offs, moves and fetches share it; each has threads of its own that write.
"""

from __future__ import annotations

from common.host import host_identity
from kvcache.memory import Memory
from kvtransfer.receiver import PoolReceiver
from kvtransfer.region import arena_regions, pool_regions
from kvtransfer.select import PoolSender, open_receiver, open_sender
from kvtransfer.transport import Bounds
from wire.messages.transfer import TransferEndpoint
from wire.records import layout_digest
from worker.mapped_peers import MappedPeers
from worker.options import WorkerOptions


class PoolTransport:
    """Owns receiver and sender. Engine loop's thread only, but for the sender's own writes."""

    def __init__(self, options: WorkerOptions, memory: Memory, fingerprint: str) -> None:
        """`fingerprint`: of the model. Raises ConfigError when the named backend does not work here."""
        self.regions = pool_regions(memory)
        self.arenas = arena_regions(memory)
        self.host = host_identity()
        self.fingerprint = fingerprint
        self.layout = layout_digest(memory.layouts())
        self._peers = MappedPeers()
        bounds = Bounds(write_s=options.transfer_timeout_s)
        self.receiver: PoolReceiver = open_receiver(
            self.regions,
            options.kv_transfer_backend,
            options.interface,
            bounds,
            encrypted=options.secret() is not None,
            ports=options.ports.of("kv"),
            mooncake_ports=options.ports.of("mooncake"),
        )
        try:
            self.sender: PoolSender = open_sender(
                self.regions,
                self.host,
                options.kv_transfer_backend,
                options.interface,
                bounds,
                options.ports.of("mooncake"),
                self.arenas,
            )
        except BaseException:
            self.receiver.close()
            raise

    def close(self) -> None:
        """Close every connection. The threads that write have ended."""
        self.sender.close()
        self.receiver.close()

    def opened(self, endpoint: TransferEndpoint, mailbox: str, now: float) -> None:
        """Pages of a KVSender go to this endpoint, of the worker at `mailbox`, until it is `closed`."""
        self._peers.opened(endpoint, mailbox, now)

    def closed(self, endpoint: TransferEndpoint, now: float) -> None:
        """A KVSender to this endpoint has posted its Sent."""
        self._peers.closed(endpoint, now)

    def on_lost(self, mailbox: str) -> None:
        """A mailbox has gone down. What is being sent to that worker fails at once."""
        for endpoint in self._peers.of(mailbox):
            self.sender.suspend(endpoint)

    def on_up(self, mailbox: str) -> None:
        """A mailbox is up."""
        for endpoint in self._peers.of(mailbox):
            self.sender.resume(endpoint)

    def drop_idle(self, now: float) -> None:
        """Unmap the pools of workers that have been sent nothing for long."""
        for endpoint in self._peers.take_idle(now):
            self.sender.drain(endpoint)
