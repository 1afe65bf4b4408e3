"""RequestLines: a line of JSON for each request, for log collectors (docs/traces.md)."""

from __future__ import annotations

import logging
import sys
from datetime import UTC, datetime
from logging.handlers import WatchedFileHandler
from pathlib import Path

import msgspec
from msgspec.structs import replace

from common.errors import BatonError, ConfigError
from router.request_metrics import cause_of
from router.streams.generation import Generation
from router.trace import RequestTrace

STDOUT = Path("-")


class Generated(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a request has come to at the workers. Tokens, and seconds from its arrival."""

    model: str
    tenant: str
    choices: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    ends: list[str]  # stop, length, abort, error or interrupted, of each choice
    workers: list[list[str]]  # of each epoch of each room: prefill if there was one, and decode
    restarts: int = 0  # and moves
    ttft_s: float | None = None
    kv_bytes: int = 0  # as far as workers have said
    prompts: list[str] | None = None

    def __add__(self, later: Generated) -> Generated:
        """With what a later part of the same request has come to."""
        return replace(
            self,
            choices=self.choices + later.choices,
            prompt_tokens=self.prompt_tokens + later.prompt_tokens,
            cached_tokens=self.cached_tokens + later.cached_tokens,
            output_tokens=self.output_tokens + later.output_tokens,
            ends=self.ends + later.ends,
            workers=self.workers + later.workers,
            restarts=self.restarts + later.restarts,
            kv_bytes=self.kv_bytes + later.kv_bytes,
            prompts=None if self.prompts is None else self.prompts + (later.prompts or []),
        )


class RequestLine(msgspec.Struct, frozen=True, omit_defaults=True):
    """One request."""

    time: str  # of its arrival
    request_id: str
    method: str
    path: str
    status: int
    seconds: float
    trace_id: str = ""  # OpenTelemetry's
    error: str = ""  # its name, as in the metric baton_router_rejects_total
    generated: Generated | None = None


class RequestLines:
    """Appends to a file, also when it is moved away. Each line is one write."""

    def __init__(self, path: Path, with_prompts: bool) -> None:
        """Raises ConfigError for a file that cannot be written. `-` is stdout."""
        self.with_prompts = with_prompts
        try:
            self._handler = logging.StreamHandler(sys.stdout) if path == STDOUT else WatchedFileHandler(path)
        except OSError as error:
            raise ConfigError(
                "request_log", f"cannot write {path}: {error.strerror}", "name a file that can be written"
            ) from None

    def write(self, line: RequestLine) -> None:
        """Add a line. One that cannot be written is reported on stderr, and no request fails for it."""
        text = msgspec.json.encode(line).decode()
        record = logging.LogRecord("requests", logging.INFO, "", 0, text, None, None)
        try:
            self._handler.handle(record)
        except OSError:  # a file that is moved away, and cannot be made anew
            self._handler.handleError(record)

    def close(self) -> None:
        """Close the file."""
        self._handler.close()


def iso_time(at_ns: int) -> str:
    """Of the Unix clock, in UTC."""
    return datetime.fromtimestamp(at_ns / 1e9, UTC).isoformat(timespec="milliseconds")


def generated(generation: Generation, trace: RequestTrace | None, prompts: list[str] | None) -> Generated:
    """What a generation has come to. `trace` is None when it is not kept any more."""
    submission = generation.submission
    placements = [] if trace is None else trace.placements
    first_ns = 0 if trace is None else trace.first_token_ns
    return Generated(
        model=submission.model,
        tenant=submission.tenant,
        choices=submission.choice_count,
        prompt_tokens=generation.prompt_tokens(),
        cached_tokens=generation.cached_tokens(),
        output_tokens=generation.output_tokens(),
        ends=list(generation.ends),
        workers=[[name for name in (one["prefill"], one["decode"]) if name] for one in placements],
        restarts=sum(one["epoch"] > 0 for one in placements),
        ttft_s=(first_ns - submission.arrived_ns) / 1e9 if first_ns else None,
        kv_bytes=0 if trace is None else trace.kv_bytes,
        prompts=prompts,
    )


def error_name(error: BatonError | None) -> str:
    """Its name in a line."""
    return "" if error is None else cause_of(error)
