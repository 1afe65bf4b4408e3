"""`python -m tools.config_page`: write docs/configuration.md from the models that check a configuration."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cluster.config import ServeConfig

PAGE = Path(__file__).parents[1] / "docs" / "configuration.md"
_BEGIN, _END = "<!-- keys: python -m tools.config_page -->", "<!-- end of keys -->"
_FIRST = "The file"
_BOUNDS = (("minimum", "≥"), ("exclusiveMinimum", ">"), ("maximum", "≤"), ("exclusiveMaximum", "<"))

Schema = dict[str, Any]


def sections() -> dict[str, Schema]:
    """The objects of a configuration by their titles, the file itself first."""
    whole = ServeConfig.model_json_schema()
    objects = {name: one for name, one in whole["$defs"].items() if "properties" in one}
    return {_FIRST: whole, **objects}


def with_tables(page: str) -> str:
    """A page with a table for each object in its place."""
    before, _, rest = page.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    enums = {name: one for name, one in ServeConfig.model_json_schema()["$defs"].items() if "enum" in one}
    tables = [_section(title, schema, enums) for title, schema in sections().items()]
    return f"{before}{_BEGIN}\n\n{chr(10).join(tables)}\n{_END}{after}"


def _section(title: str, schema: Schema, enums: dict[str, Schema]) -> str:
    about = " ".join(str(schema.get("description", "")).split())
    required = schema.get("required", [])
    rows = "".join(
        f"| `{key}` | {_kind(field, enums)} | {_default(field, key in required)} | {_about(field)} |\n"
        for key, field in schema["properties"].items()
    )
    head = "| key | value | default | what it is |\n|---|---|---|---|\n"
    return f"## {title}\n\n{about}\n\n{head}{rows}"


def _kind(field: Schema, enums: dict[str, Schema]) -> str:
    """What a value may be."""
    if "$ref" in field:
        name = field["$ref"].rpartition("/")[2]
        return _kind(enums[name], enums) if name in enums else f"[{name}](#{name.lower()})"
    for several in ("anyOf", "oneOf", "allOf"):
        if several in field:
            kinds = dict.fromkeys(_kind(one, enums) for one in field[several])
            return " or ".join(kind for kind in kinds if kind != "null")
    if "const" in field:
        return f"`{field['const']}`"
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field.get("type") == "array":
        return f"list of {_kind(field['items'], enums)}" if "items" in field else "list"
    if field.get("type") == "object":
        values = field.get("additionalProperties")
        return f"mapping to {_kind(values, enums)}" if isinstance(values, dict) else "mapping"
    bounds = [f"{sign} {field[name]}" for name, sign in _BOUNDS if name in field]
    return ", ".join([str(field.get("type", "any")), *bounds])


def _default(field: Schema, is_required: bool) -> str:
    if is_required:
        return "required"
    value = field.get("default")
    return "" if value is None or value == [] or isinstance(value, dict) else f"`{json.dumps(value)}`"


def _about(field: Schema) -> str:
    return " ".join(str(field.get("description", "")).split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
