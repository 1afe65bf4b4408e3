"""Checks a mapping against a vendor's schema, with keys refused that the schema does not name."""

from __future__ import annotations

from typing import Any

import jsonschema


def errors(instance: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    """What is wrong, as `path: message`, one for each fault."""
    found = jsonschema.Draft202012Validator(closed(schema)).iter_errors(instance)
    return sorted(f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found)


def closed(schema: Any) -> Any:
    """The schema with unknown keys refused.

    Kubernetes drops keys that a resource's schema does not name instead of refusing them, and Ray accepts any
    key in a node's configuration. So a misspelt key has no effect, or fails when a node is started.
    """
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        inner["additionalProperties"] = False
    return inner
