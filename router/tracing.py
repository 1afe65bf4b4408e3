"""Traces of requests for OpenTelemetry: whether there are any, and what the router says for them.

OTEL_TRACES_EXPORTER or OTEL_EXPORTER_OTLP_[TRACES_]ENDPOINT turns them on. A router knows all stages of a
request, because workers send it their stamps for /debug/trace: so it makes every span, and workers none.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Protocol

from common.errors import ConfigError
from wire.messages.rooms import Timeline
from wire.stages import Stamp

_SWITCHES = (
    "OTEL_TRACES_EXPORTER",
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
)
_EXPORTERS = ("otlp", "console", "none")
_PROTOCOLS = ("OTEL_EXPORTER_OTLP_TRACES_PROTOCOL", "OTEL_EXPORTER_OTLP_PROTOCOL")
_PROTOCOL = "http/protobuf"

Attributes = Mapping[str, str | int | float]


class RequestSpan(Protocol):
    """A request that is traced, from its arrival to the end of its answer."""

    @property
    def traceparent(self) -> str:
        """Its place in its trace, as W3C's header says it."""

    def end(self, status: int) -> None:
        """The answer is out, with this HTTP status."""


class Tracing(Protocol):
    """Makes spans. Parents are named as in W3C's header `traceparent`. Times: nanoseconds, Unix clock."""

    def start(self, name: str, headers: Mapping[str, str], arrived_ns: int) -> RequestSpan | None:
        """A request has come, with these headers. None: it is not sampled."""

    def stages(
        self, parent: str, name: str, stamps: list[Stamp], ended_ns: int, attributes: Attributes
    ) -> None:
        """A span of one process, with one in it for each stage. The last stage ended at `ended_ns`."""

    def close(self) -> None:
        """Export what is left, within a bound."""


def worker_attributes(told: Timeline) -> Attributes:
    """What a worker says of its part in a room."""
    about: dict[str, str | int | float] = {
        "baton.worker": told.worker,
        "baton.room": str(told.room),  # beyond the integers of JSON
        "baton.epoch": told.epoch,
    }
    if told.kv_bytes:
        about |= {"baton.kv_bytes": told.kv_bytes, "baton.kv_backend": told.kv_backend}
        about |= {"baton.kv_seconds": told.kv_seconds}
    about |= {f"baton.cached_from.{source}": tokens for source, tokens in told.cached_from.items()}
    return about


def open_tracing(environment: Mapping[str, str]) -> Tracing | None:
    """What the standard variables ask for. None: no traces; then nothing of OpenTelemetry is imported.

    Raises ConfigError for an exporter or a protocol that is not here.
    """
    asked = [environment[name] for name in _SWITCHES if environment.get(name)]
    exporter = environment.get("OTEL_TRACES_EXPORTER") or "otlp"
    if not asked or environment.get("OTEL_SDK_DISABLED", "").lower() == "true" or exporter == "none":
        return None
    _check("OTEL_TRACES_EXPORTER", exporter, _EXPORTERS)
    for name in _PROTOCOLS:
        _check(name, environment.get(name) or _PROTOCOL, (_PROTOCOL,))
    # Here, because the SDK takes 0.2 s and 20 MB that routers without traces do not need.
    tracing: Tracing = import_module("router.spans").Spans.of_environment(exporter)
    return tracing


def _check(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ConfigError(name, f"{value!r} is not supported", f"use {' or '.join(known)}")
