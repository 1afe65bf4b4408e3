"""Requests that schemathesis makes from our OpenAPI document: borders of fields, random ones."""

from __future__ import annotations

from typing import Any

import httpx
import schemathesis
from schemathesis.config import SchemathesisConfig
from schemathesis.engine import events, from_schema

from tests.fuzz.findings import Findings

_CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)


def send_documented(url: str, examples: int, borders: bool, findings: Findings) -> None:
    """Send them: `examples` random ones for each path, and with `borders` the borders of each field.

    What is answered must be what the document says. That and a 5xx other than 503 count as unexpected_5xx.
    """
    document = httpx.get(f"{url}/openapi.json").raise_for_status().json()
    schema = schemathesis.openapi.from_dict(document, config=_config(url, examples, borders))
    for event in from_schema(schema).execute():
        if isinstance(event, events.ScenarioFinished):
            findings.http += len(event.recorder.interactions)
            _read(event.recorder, findings)
        elif isinstance(event, events.NonFatalError | events.FatalError):
            findings.hangs += 1
            findings.tell(f"schemathesis: {event}")


def _config(url: str, examples: int, borders: bool) -> SchemathesisConfig:
    return SchemathesisConfig.from_dict(
        {
            "workers": 1,  # with more, CPython 3.11 fails in the parser of its own source
            "base-url": url,
            "continue-on-failure": True,
            "request-timeout": 30,
            "checks": {"enabled": False, **{name: {"enabled": True} for name in _CHECKS}},
            "generation": {
                "max-examples": examples, "no-shrink": True, "database": "none", "deterministic": True,
            },
            # Examples are few (test_its_examples_are_valid), and to look for them takes most of the time.
            "phases": {
                "coverage": {"enabled": borders},
                "stateful": {"enabled": False},
                "examples": {"enabled": False},
            },
        }
    )  # fmt: skip


def _read(recorder: Any, findings: Findings) -> None:
    for case_id, interaction in recorder.interactions.items():
        if interaction.response is None:
            findings.hangs += 1
            findings.tell(f"no answer: {interaction.request.method} {interaction.request.uri}")
        for check in recorder.checks.get(case_id, ()):
            if check.failure_info is not None and not _deliberate(interaction):
                findings.unexpected_5xx += 1
                wrong, how = check.failure_info.failure, check.failure_info.code_sample
                findings.tell(f"{recorder.label}: {wrong.title}: {wrong.message[:500]}\n{how}")


def _deliberate(interaction: Any) -> bool:
    """A 503 with Retry-After."""
    response = interaction.response
    return response is not None and response.status_code == 503 and "retry-after" in response.headers
