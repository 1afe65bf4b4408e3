"""Checks a manifest against the schema of a Kubernetes custom resource, every key included."""

from __future__ import annotations

from typing import Any

import jsonschema


def errors(manifest: dict[str, Any], schema: dict[str, Any]) -> list[str]:
    """What is wrong with a manifest, as `path: message`, one for each fault."""
    found = jsonschema.Draft202012Validator(closed(schema)).iter_errors(manifest)
    return sorted(f"{'.'.join(map(str, error.absolute_path))}: {error.message}" for error in found)


def closed(schema: Any) -> Any:
    """The schema with unknown keys refused.

    Kubernetes drops keys that a structural schema does not name instead of refusing them, so a misspelt key
    has no effect. `metadata` of the resource itself is Kubernetes' own and stays open.
    """
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    inner = {key: closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict) and "additionalProperties" not in schema:
        inner["additionalProperties"] = False
    return inner
