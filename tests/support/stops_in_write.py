"""Run a program so that it stops in a write: `python -m tests.support.stops_in_write FLAG MODULE ...`.

When the file FLAG exists, the next write into a decode worker's shared memory removes it and stops the whole
process (SIGSTOP), after the write was granted and before its bytes are stored. SIGCONT lets it store them.
"""

from __future__ import annotations

import runpy
import signal
import sys
import threading
from pathlib import Path

from kvtransfer.channel import GrantedWrite
from kvtransfer.shm import ShmSender


def main() -> None:
    """Patch, then run the module as if it had been started itself."""
    flag, module, *arguments = sys.argv[1:]
    move = ShmSender._move  # the only place that is after the grant and before the bytes

    def stop_and_move(sender: ShmSender, granted: GrantedWrite) -> None:
        try:
            Path(flag).unlink()
        except FileNotFoundError:
            pass
        else:
            # To this thread: a signal to the process could let this thread go on for a moment.
            signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)
        move(sender, granted)

    ShmSender._move = stop_and_move  # type: ignore[method-assign]
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
