"""Host: a machine to `ray up`, made of namespaces: its own network, processes, home, /tmp, /etc and /dev/shm.

What a host leaves behind is everything that its namespaces still show, apart from its sshd: processes,
listening ports, files of /dev/shm. Nothing has to be marked or looked up by name.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path

from tests.hosts.network import Network

_SSH_PORT = 22
_START_S = 20.0
_COMMAND_S = 120.0
_POLL_S = 0.1
_SSHD_CONFIG = """
HostKey {disk}/host_key
AuthorizedKeysFile {disk}/authorized_keys
PidFile none
StrictModes no
UsePAM no
PermitRootLogin prohibit-password
"""
# The run's own directories come from outside the host's view: they are bound before anything hides them.
# A tmpfs as /dev/shm is new after each start, as after a boot.
_BOOT = """
set -eu
mount -t overlay overlay -o lowerdir=/etc,upperdir={disk}/etc,workdir={disk}/etc.work /etc
mount --bind {disk}/tmp /tmp
mount --bind {disk}/home /root
mount -t tmpfs tmpfs /dev/shm
mount -t tmpfs tmpfs /run
mkdir -p /run/sshd
hostname {name}
exec /usr/sbin/sshd -D -f {disk}/sshd_config -E {disk}/sshd.log
"""


def missing() -> str:
    """What this machine lacks for such hosts; "" when nothing."""
    for tool, package in {
        "/usr/sbin/sshd": "openssh-server",
        "ssh-keygen": "openssh-client",
        "rsync": "rsync",
        "redis-server": "redis-server",
        "unshare": "util-linux",
        "make": "make",
        "g++": "g++",
    }.items():
        if shutil.which(tool) is None:
            return f"there is no {tool} (Debian: {package})"
    if "overlay" not in Path("/proc/filesystems").read_text():
        return "the kernel has no overlay file system"
    return ""


class Host:
    """A host of a network. Its disk is `disk`, below a directory that no host hides (so not below /tmp)."""

    def __init__(self, net: Network, name: str, disk: Path, public_key: str) -> None:
        """The disk is made if it is not there. The host is off until `start`."""
        self.name, self.address = name, net.address(name)
        self._net, self._disk = net, disk
        self._boot: subprocess.Popen[bytes] | None = None
        self._first = 0  # the process that all others there end with
        for folder in ("home", "tmp", "etc", "etc.work"):
            (disk / folder).mkdir(parents=True, exist_ok=True)
        (disk / "tmp").chmod(0o1777)
        (disk / "authorized_keys").write_text(public_key)
        (disk / "sshd_config").write_text(_SSHD_CONFIG.format(disk=disk))
        if not (disk / "host_key").exists():
            make_key(disk / "host_key")

    @property
    def home(self) -> Path:
        """The home of root there, as seen from outside."""
        return self._disk / "home"

    @property
    def etc(self) -> Path:
        """Files that /etc has there and nowhere else, as seen from outside. Write them before `start`."""
        return self._disk / "etc"

    def start(self) -> None:
        """Switch it on. Returns when its sshd answers."""
        assert self._boot is None, f"{self.name} is on"
        script = _BOOT.format(disk=self._disk, name=self.name)
        unshare = ["unshare", "--mount", "--uts", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
        with self._net.on(self.name), (self._disk / "boot.log").open("a") as log:
            self._boot = subprocess.Popen([*unshare, "sh", "-c", script], env=_bare_environment(), stderr=log)
            self._wait_for_sshd()
        children = Path(f"/proc/{self._boot.pid}/task/{self._boot.pid}/children").read_text().split()
        self._first = int(children[0])

    def kill(self) -> None:
        """Switch it off: all of its processes end at once, and its memory is gone. The disk stays."""
        if self._boot is not None:
            os.kill(self._first, signal.SIGKILL)  # the kernel ends all others with it, and then unshare ends
            self._boot.wait(_START_S)
            self._boot = None

    def run(self, command: str, timeout_s: float = _COMMAND_S, **environment: str) -> str:
        """A shell command there, as root, in its home. Returns what it prints on stdout; raises
        CalledProcessError."""
        assert self._boot is not None, f"{self.name} is off"
        enter = ["nsenter", "--target", str(self._first), "--mount", "--uts", "--ipc", "--net", "--pid"]
        done = subprocess.run(
            [*enter, "bash", "-c", f"cd /root && {command}"],
            env={**_bare_environment(), **environment},
            stdout=subprocess.PIPE,
            text=True,
            timeout=timeout_s,
            check=True,
        )
        return done.stdout

    # -- what is there -----------------------------------------------------------------------------

    def processes(self) -> dict[int, str]:
        """Command lines by number, without the sshd's and kernel's."""
        found = {}
        for line in self.run("ps -e -ww -o pid=,args=").splitlines():
            pid, _, arguments = line.strip().partition(" ")
            if not re.match(r"sshd|/usr/sbin/sshd|ps -e|bash -c cd /root && ps|\[.*\]$", arguments.strip()):
                found[int(pid)] = arguments.strip()
        return found

    def listeners(self) -> set[int]:
        """TCP ports on which something listens, without ssh's."""
        ports = set()
        for table in ("tcp", "tcp6"):
            for line in self.run(f"cat /proc/net/{table}").splitlines()[1:]:
                fields = line.split()
                if fields[3] == "0A":
                    ports.add(int(fields[1].rpartition(":")[2], 16))
        return ports - {_SSH_PORT}

    def shared_files(self) -> list[str]:
        """Files in /dev/shm."""
        return self.run("ls -A /dev/shm").split()

    def leftovers(self, timeout_s: float) -> list[str]:
        """Descriptions of all that is there. Waits up to `timeout_s` for it to go."""
        deadline = time.monotonic() + timeout_s
        while (found := self._found()) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        return found

    # -- inside ------------------------------------------------------------------------------------

    def _found(self) -> list[str]:
        return [
            *(f"{self.name}: process {pid} {what[:120]}" for pid, what in sorted(self.processes().items())),
            *(f"{self.name}: port {port}" for port in sorted(self.listeners())),
            *(f"{self.name}: shared memory {name}" for name in self.shared_files()),
        ]

    def _wait_for_sshd(self) -> None:
        assert self._boot is not None
        deadline = time.monotonic() + _START_S
        while True:
            try:
                socket.create_connection((self.address, _SSH_PORT), 1.0).close()
            except OSError:
                if self._boot.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"{self.name} does not start: see *.log in {self._disk}") from None
                time.sleep(_POLL_S)
            else:
                return


def make_key(path: Path) -> None:
    """A key pair for ssh, without a pass phrase."""
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", path], check=True)


def _bare_environment() -> Mapping[str, str]:
    """What a machine has after a login, and nothing of the one that runs this."""
    path = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    return {"PATH": path, "HOME": "/root", "LANG": os.environ.get("LANG", "C.UTF-8")}
