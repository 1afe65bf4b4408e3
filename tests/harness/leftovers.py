"""What a run leaves behind: processes, listening ports, shared memory, temporary files.

Every process of a run inherits an environment variable with a value of the run's own, so all of them are
found, whatever their names and parents are. Linux only (/proc).
"""

from __future__ import annotations

import os
import re
import secrets
import time
from dataclasses import dataclass, field
from pathlib import Path

_VARIABLE = "BATON_RUN"
_POLL_S = 0.1
_SOCKET = re.compile(r"socket:\[(\d+)\]")
_LISTENING = "0A"
_SHM = "/dev/shm/"


@dataclass
class Run:
    """The processes started since `begin`, and what they hold. Call `look` while they still run."""

    marker: str
    processes: dict[int, str] = field(default_factory=dict)
    ports: set[int] = field(default_factory=set)
    memory_files: set[str] = field(default_factory=set)  # inodes of memfds
    shared_files: set[Path] = field(default_factory=set)

    @classmethod
    def begin(cls) -> Run:
        """Mark this process's environment: what it starts from now on belongs to the run."""
        marker = secrets.token_hex(8)
        os.environ[_VARIABLE] = marker
        return cls(marker)

    def look(self) -> None:
        """Record what the run's processes hold now."""
        listening = _listening_ports()
        for pid in _marked(self.marker):
            self.processes[pid] = _name(pid)
            for target in _open_files(pid):
                socket = _SOCKET.fullmatch(target)
                if socket and socket.group(1) in listening:
                    self.ports.add(listening[socket.group(1)])
                elif target.startswith(_SHM):
                    self.shared_files.add(Path(target.removesuffix(" (deleted)")))
            self.memory_files |= _memfds(pid)

    def leftovers(self, timeout_s: float) -> list[str]:
        """Descriptions of what is still there. Waits up to `timeout_s` for processes to end."""
        deadline = time.monotonic() + timeout_s
        while (found := self._found()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return found

    def _found(self) -> list[str]:
        alive = _marked(self.marker)
        open_ports = self.ports & set(_listening_ports().values())
        return [
            *(f"process {pid} {_name(pid)}" for pid in sorted(alive)),
            *(f"port {port}" for port in sorted(open_ports)),
            *(f"shared memory {path}" for path in sorted(self.shared_files) if path.exists()),
            *(f"memfd of process {pid}" for pid in _pids() if _memfds(pid) & self.memory_files),
        ]


def _pids() -> list[int]:
    return [int(entry) for entry in os.listdir("/proc") if entry.isdigit()]


def _marked(marker: str) -> set[int]:
    wanted = f"{_VARIABLE}={marker}".encode()
    found = set()
    for pid in _pids():
        if pid == os.getpid():
            continue
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:  # it ended, or it is another user's
            continue
        if wanted in environment:  # a zombie's is empty: it holds nothing any more
            found.add(pid)
    return found


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:80]
    except OSError:
        return "(ended)"


def _open_files(pid: int) -> list[str]:
    """What the descriptors and the memory maps of a process point at."""
    found = []
    try:
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            found.append(os.readlink(f"/proc/{pid}/fd/{descriptor}"))
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            path = line.partition("/")
            if path[1]:
                found.append("/" + path[2])
    except OSError:  # it ended while we looked
        return found
    return found


def _memfds(pid: int) -> set[str]:
    """Inodes of the memfds a process has mapped or open."""
    found = set()
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            if "/memfd:baton" in line:
                found.add(line.split()[4])
        for descriptor in os.listdir(f"/proc/{pid}/fd"):
            link = f"/proc/{pid}/fd/{descriptor}"
            if os.readlink(link).startswith("/memfd:baton"):
                found.add(str(os.stat(link).st_ino))
    except OSError:  # it ended while we looked
        return found
    return found


def _listening_ports() -> dict[str, int]:
    """TCP ports in state LISTEN, by socket inode."""
    ports = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == _LISTENING:
                ports[fields[9]] = int(fields[1].rpartition(":")[2], 16)
    return ports
