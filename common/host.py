"""This host: default addresses, and its identity among hosts."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

from common.errors import ConfigError

LOOPBACK = "127.0.0.1"
AUTO = "auto"
HTTP_PORT = 8000  # where the API listens unless told
_ELSEWHERE = "192.0.2.1"  # reserved for documentation: behind the default route on every host
_SIOCGIFADDR = 0x8915


def host_identity() -> str:
    """Names the host; between two processes of equal identity, shared memory and Unix sockets work.

    Made of the boot id, the network namespace (abstract Unix sockets live in it) and the PID namespace
    (pidfd needs it).
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{os.readlink('/proc/self/ns/net')}/{os.readlink('/proc/self/ns/pid')}"


def process_start(pid: int) -> int:
    """When a process of this host was started, in clock ticks since the boot. 0: there is none to be seen.

    With the pid it names a process for as long as the host is up.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])  # the name, in parentheses, may contain anything


def is_loopback(interface: str) -> bool:
    """Whether only this host reaches an interface."""
    try:
        return ipaddress.ip_address(interface).is_loopback
    except ValueError:
        return interface == "localhost"


def local_address(interface: str) -> str:
    """The address that sockets of this host bind to and peers are told, for an address, a network device
    (`eth0`), a name of this host, or `auto`: the address from which this host reaches others.

    Raises ConfigError for one that means nothing here, for one of IPv6, and for all addresses at once
    (0.0.0.0), which no peer can connect to.
    """
    if interface == AUTO:
        return _outward_address()
    try:
        address = ipaddress.ip_address(interface)
    except ValueError:
        pass
    else:
        if address.is_unspecified:
            problem = f"{interface} is no address that peers can connect to"
            raise ConfigError("interface", problem, f"give one address, a network device, or {AUTO}")
        if address.version != 4:
            problem = f"{interface} is an address of IPv6, which Baton's own sockets do not speak"
            raise ConfigError("interface", problem, "give one of IPv4")
        return interface
    if interface in (name for _, name in socket.if_nameindex()):
        return _address_of_device(interface)
    try:
        return socket.gethostbyname(interface)
    except OSError as error:
        devices = ", ".join(name for _, name in socket.if_nameindex())
        raise ConfigError(
            "interface",
            f"{interface} is no network device or host name here ({error})",
            f"give an address, one of {devices}, or {AUTO}",
        ) from None


def _outward_address() -> str:
    """Nothing is sent: connecting a UDP socket only looks up the route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((_ELSEWHERE, 9))
        except OSError as error:
            problem = f"this host has no route to others ({error.strerror})"
            raise ConfigError("interface", problem, f"give an address of it, or {LOOPBACK}") from None
        return str(probe.getsockname()[0])


def _address_of_device(device: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            answer = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", device.encode()))
        except OSError as error:
            problem = f"the network device {device} has no IPv4 address ({error.strerror})"
            raise ConfigError("interface", problem, "give an address of this host") from None
    return socket.inet_ntoa(answer[20:24])  # struct ifreq: a name of 16 bytes, then a sockaddr_in
