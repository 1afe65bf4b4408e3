"""A command that goes on in a process and a session of its own, while this process passes signals to it.

`timeout`, job control and process managers signal a whole process group. The processes of a Ray that was
started in that group would end at once, and nothing could drain. Ray has no option that starts them
elsewhere. In a session of its own only the command sees the signal, and it ends Ray when all is drained.

What the command leaves when it ends, however it ends, is ended here: orphans become children of this process
(PR_SET_CHILD_SUBREAPER of prctl(2)).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
import time
from collections.abc import Iterable
from pathlib import Path

_PR_SET_PDEATHSIG = 1  # prctl(2)
_PR_SET_CHILD_SUBREAPER = 36
_BY_SIGNAL = 128  # as shells add it to the number of the signal that ended a process
_TERM_S = 3.0  # for what is left to end by itself
_KILL_S = 10.0
_POLL_S = 0.02
_PASSED_ON = (signal.SIGINT, signal.SIGTERM)


def leave_session() -> int | None:
    """None in the process that goes on. In the one that was there before: the exit code of the other, once it
    and all that it started have ended. Call it before there are threads.

    SIGINT and SIGTERM are passed on; the third of them is a SIGKILL. If this process is killed, the other
    gets a SIGTERM.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    caller = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, _PASSED_ON)  # until this process passes them on
    child = os.fork()
    if child:
        return _wait_for(child, mask)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    os.setsid()
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != caller:  # it was killed before it could be watched
        os.kill(os.getpid(), signal.SIGTERM)
    return None


def _wait_for(child: int, mask: Iterable[int]) -> int:
    passed: list[int] = []

    def pass_on(number: int, _: object) -> None:
        passed.append(number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, number if len(passed) < 3 else signal.SIGKILL)

    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    for number in _PASSED_ON:
        signal.signal(number, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    _, status = os.waitpid(child, 0)
    _end_children()
    code = os.waitstatus_to_exitcode(status)
    if code < 0:  # Ray may crash when its start is interrupted: what ended it is the first signal
        return _BY_SIGNAL + (passed[0] if passed else -code)
    return code


def _end_children() -> None:
    """End all children, and theirs, which become children when their parents end."""
    start = time.monotonic()
    while time.monotonic() < start + _KILL_S:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        children = _children()
        if not children:
            return
        number = signal.SIGTERM if time.monotonic() < start + _TERM_S else signal.SIGKILL
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
        time.sleep(_POLL_S)


def _children() -> list[int]:
    """This process is single-threaded: the children of its one thread are all.

    None where the kernel does not list them (CONFIG_PROC_CHILDREN).
    """
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    return [int(pid) for pid in children.read_text().split()] if children.exists() else []


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None, use_errno=True).prctl(option, value)
