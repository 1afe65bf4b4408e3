"""Ranges of TCP ports: how an option names one, and which of its ports a socket takes."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field

from common.errors import ConfigError
from common.used_ports import known_ports, warn_of_reuse

_LAST_PORT = 65535


def _text(value: object) -> object:
    return str(value) if isinstance(value, int) else value  # YAML and JSON make a number of one port


def _checked(text: str) -> str:
    first, _, last = text.partition("-")
    if not int(first) <= int(last or first) <= _LAST_PORT:
        raise ValueError(f"{text} is not a range of TCP ports, such as 9110-9199")
    return text


PortText = Annotated[
    str, Field(pattern=r"^\d{1,5}(-\d{1,5})?$"), BeforeValidator(_text), AfterValidator(_checked)
]
"""An option's value: "20000-20199", one port, or 0 for any free one."""


@dataclass(frozen=True, slots=True)
class Ports:
    """The ports that a socket may have. `option` names them in errors."""

    text: str = "0"  # a PortText
    option: str = "port"

    @property
    def choice(self) -> range:
        """All of them; range(0, 1): any free port."""
        first, _, last = self.text.partition("-")
        return range(int(first), int(last or first) + 1)

    @property
    def any_free(self) -> bool:
        """Whether the kernel chooses."""
        return self.choice == range(1)


ANY_PORT = Ports()


def bind_free(ports: Ports, host: str, bind: Callable[[int], None]) -> None:
    """Call `bind` with one port after another until it raises no EADDRINUSE: first those of the range that
    nobody has used lately, in a random order, then the others, the longest unused first (used_ports.py).

    Raises ConfigError: for `ports.option` when no port is free, for `interface` when `host` cannot be bound.
    """
    if ports.any_free:
        _bind_first([0], ports, host, bind)
        return
    with known_ports(host, ports.choice) as known:
        port = _bind_first(known.order, ports, host, bind)
        if port not in known.fresh:
            warn_of_reuse(host, [port])


def _bind_first(order: list[int], ports: Ports, host: str, bind: Callable[[int], None]) -> int:
    for port in order:
        try:
            bind(port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            problem = f"{host} cannot be bound ({error.strerror})"
            raise ConfigError("interface", problem, "give an address of this host") from None
        return port
    problem = f"no port of {ports.text} is free on {host}"
    raise ConfigError(ports.option, problem, "give a larger range, or 0 for any free port")
