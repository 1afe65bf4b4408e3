"""Options at the edge: a mapping becomes a checked pydantic object, or a ConfigError and exit code 2."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, ValidationError

from common.errors import ConfigError

CONFIG_ERROR_EXIT = 2


class Options(BaseModel):
    """Base of every options object: immutable, and an unknown key is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    def given(self) -> dict[str, Any]:
        """The fields that were set, without those that have their default."""
        return {name: getattr(self, name) for name in self.model_fields_set}


OptionsType = TypeVar("OptionsType", bound=BaseModel)


def parse_options(kind: type[OptionsType], raw: Mapping[str, Any]) -> OptionsType:
    """`raw` checked against `kind`. Raises ConfigError naming the first bad key and what to do."""
    try:
        return kind.model_validate(raw)
    except ValidationError as error:
        first = error.errors()[0]
        path = first["loc"]
        key = ".".join(str(part) for part in path) or "options"
        if first["type"] == "extra_forbidden":
            known = ", ".join(sorted(_section(kind, path[:-1]).model_fields))
            raise ConfigError(key, "unknown key", f"remove it, or use one of: {known}") from None
        message = first["msg"].removeprefix("Value error, ")
        raise ConfigError(key, message, "correct the value") from None


def _section(kind: type[BaseModel], path: Sequence[str | int]) -> type[BaseModel]:
    """The model that describes the section at `path`."""
    is_name = False
    for part in path:
        if isinstance(part, int) or is_name:
            is_name = False
            continue  # the place in a list of sections, or the name in a mapping
        annotation: Any = kind.model_fields[str(part)].annotation
        kinds = (annotation, *get_args(annotation))  # a section, or a section or None
        kind = next(one for one in kinds if isinstance(one, type) and issubclass(one, BaseModel))
        is_name = get_origin(annotation) is dict
    return kind


def read_options(kind: type[OptionsType], path: Path) -> OptionsType:
    """Options from a JSON file. Raises ConfigError for a missing, unreadable or wrong file."""
    try:
        raw = json.loads(path.read_text())
    except OSError as error:
        raise ConfigError(
            "--options", f"cannot read {path}: {error.strerror}", "give a readable file"
        ) from None
    except ValueError as error:
        raise ConfigError("--options", f"{path} is not JSON: {error}", "correct the file") from None
    if not isinstance(raw, dict):
        raise ConfigError("--options", f"{path} is not a JSON object", "correct the file")
    return parse_options(kind, raw)


@contextmanager
def exit_on_config_error(program: str) -> Iterator[None]:
    """Turn a ConfigError inside into one line on stderr and exit code 2."""
    try:
        yield
    except ConfigError as error:
        line = " ".join(str(error).split())
        sys.stderr.write(f"{program}: {line}\n")
        raise SystemExit(CONFIG_ERROR_EXIT) from None
