"""The process of a rank other than 0: python -m engine.ranks FD, which rank 0 starts.

It computes what rank 0 tells it to and has nothing else of a worker: no scheduler, no tree, no peers. It ends
when rank 0 hangs up, whatever it is doing.
"""

from __future__ import annotations

import logging
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Mapping

import torch

from common.errors import ConfigError
from engine.config import EngineConfig
from engine.forward import ModelForward
from engine.loader import LoadedModel, load_model
from engine.parallel.group import RankGroup, SharedMemoryGroup, memory_bytes
from engine.ranks.messages import CannotStart, Compute, LoadPart, OpenPools, RankSocket, Ready
from engine.ranks.pools import map_pools
from kvcache.buffers import SharedBuffer
from kvcache.pool import KVCache

log = logging.getLogger(__name__)


def main() -> int:
    """Serve rank 0 until it hangs up."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of a terminal: rank 0 hangs up when it has drained
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    threading.Thread(target=_end_with_rank_0, args=(sock.dup(),), name="rank-0", daemon=True).start()
    orders = RankSocket(sock)
    try:
        _serve(orders)
    except (EOFError, OSError):
        return 0  # rank 0 has hung up
    except ConfigError as error:
        orders.send(CannotStart(error.key, error.problem, error.remedy))
        return 1
    return 0


def _end_with_rank_0(sock: socket.socket) -> None:
    """A rank that waits for the others in a forward does not read."""
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP)
    poller.poll()
    os._exit(0)


def _serve(orders: RankSocket) -> None:
    load = orders.order()
    assert isinstance(load, LoadPart)
    memory, to_rank_0 = orders.receive_fds(2)
    barrier = socket.socket(fileno=to_rank_0)
    barrier.settimeout(load.timeout_s)
    group = SharedMemoryGroup(load.rank, SharedBuffer(memory, memory_bytes(load.size)), [barrier], load.size)
    loaded = load_model(load.config, group)
    orders.send(Ready())
    opened = orders.order()
    assert isinstance(opened, OpenPools)
    pools = map_pools(opened, loaded.spec.groups, group, orders)
    rank = _Rank(loaded, pools, load.config, group)
    orders.send(Ready())
    while True:
        compute = orders.order()
        assert isinstance(compute, Compute)
        rank.compute(compute)


class _Rank:
    def __init__(
        self, loaded: LoadedModel, pools: Mapping[str, KVCache], config: EngineConfig, group: RankGroup
    ) -> None:
        self._forward = ModelForward(loaded, pools, config)
        self._group = group

    def compute(self, compute: Compute) -> None:
        batch = compute.batch()
        with torch.inference_mode(), self._forward.threads_for(batch):
            ids = torch.empty(len(batch.positions), dtype=torch.int64)
            self._group.share(ids)
            self._forward.of_batch(batch, ids)


if __name__ == "__main__":
    sys.exit(main())
