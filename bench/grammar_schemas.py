"""Random JSON schemas for bench.grammar, easy and medium: what applications ask for."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

Schema = dict[str, Any]
Make = Callable[[random.Random, int], Schema]
_WORDS = ("name", "id", "tags", "price", "city", "at", "kind", "note", "items", "size", "owner", "email")
_PATTERNS = ("^[a-z]{1,12}$", "^[A-Z]{2}-[0-9]{4}$", r"^\d{3}(-\d{2})?$")
_FORMATS = ("date", "time", "date-time", "email", "uuid", "ipv4")


def make_schemas(count: int, seed: int = 1) -> list[Schema]:
    """Objects with up to five levels, a quarter of them with definitions, some of these recursive."""
    rng = random.Random(seed)
    return [_document(rng) for _ in range(count)]


def _document(rng: random.Random) -> Schema:
    schema = _object(rng, 3)
    if rng.random() < 0.25:
        node = _object(rng, 1)
        node["properties"]["next"] = {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/node"}]}
        schema["properties"]["first"] = {"$ref": "#/$defs/node"}
        schema["required"] = [*schema["required"], "first"]
        schema["$defs"] = {"node": node}
    return schema


def _object(rng: random.Random, depth: int) -> Schema:
    names = rng.sample(_WORDS, rng.randint(1, 5))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth) for name in names},
        "required": rng.sample(names, rng.randint(0, len(names))),
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> Schema:
    nested: list[Make] = [_array, _object, _either]
    kinds: list[Make] = [_text, _number, _listed, _plain, *(nested if depth else ())]
    return rng.choice(kinds)(rng, depth - 1)


def _text(rng: random.Random, _: int) -> Schema:
    kind = rng.randrange(4)
    if kind == 0:
        return {"type": "string", "pattern": rng.choice(_PATTERNS)}
    if kind == 1:
        return {"type": "string", "format": rng.choice(_FORMATS)}
    shortest = rng.randint(0, 5)
    bounds = {"minLength": shortest, "maxLength": shortest + rng.randint(1, 30)} if kind == 2 else {}
    return {"type": "string", **bounds}


def _number(rng: random.Random, _: int) -> Schema:
    low = rng.randint(-1000, 1000)
    if rng.random() < 0.3:
        return {"type": "number", "minimum": low}
    return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 5000)}


def _listed(rng: random.Random, _: int) -> Schema:
    return {"enum": [*rng.sample(_WORDS, rng.randint(1, 6)), rng.randint(0, 9), None]}


def _plain(rng: random.Random, _: int) -> Schema:
    return {"type": rng.choice(("boolean", "null", "integer"))}


def _array(rng: random.Random, depth: int) -> Schema:
    fewest = rng.randint(0, 2)
    return {
        "type": "array",
        "items": _value(rng, depth),
        "minItems": fewest,
        "maxItems": fewest + rng.randint(1, 4),
    }


def _either(rng: random.Random, depth: int) -> Schema:
    return {"anyOf": [_value(rng, depth) for _ in range(rng.randint(2, 3))]}
