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

from common.errors import ConfigError
from engine.ranks.messages import CannotStart, RankSocket
from engine.ranks.rank import serve

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
        serve(orders)
    except EOFError:
        return 0  # rank 0 has hung up
    except ConfigError as error:
        orders.send(CannotStart(error.key, error.problem, error.remedy))
    except OSError as error:  # of this rank, or another has ended
        log.error("a rank ends: %s", error)
    return 1


def _end_with_rank_0(sock: socket.socket) -> None:
    """A rank that waits for the others in a forward does not read."""
    poller = select.poll()
    poller.register(sock, select.POLLRDHUP)
    poller.poll()
    os._exit(0)


if __name__ == "__main__":
    sys.exit(main())
