"""Chat templates: a sandboxed Jinja environment with the helpers that models' templates use.

Templates come with models and are not trusted: the sandbox is immutable, templates get only plain data parsed
from JSON, and names with a leading underscore are refused.
"""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import jinja2.utils

from common.errors import ConfigError, InvalidRequest

_REASONING_NAMES = ("reasoning_content", "thinking", "reasoning")


class ChatTemplate:
    """A model's chat template, or several by name: "default", and "tool_use" for chats with tools."""

    def __init__(self, sources: dict[str, str], special_tokens: dict[str, str]) -> None:
        """`sources` are by name. Raises ConfigError if a template does not compile."""
        environment = _environment()
        self._special_tokens = special_tokens
        self._templates: dict[str, jinja2.Template] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = environment.from_string(source)
            except jinja2.TemplateError as error:
                raise ConfigError(
                    "model", f"its chat template {name!r} does not compile ({error})", "repair it"
                ) from None

    @classmethod
    def load(cls, model: Path, config: dict[str, Any], special_tokens: dict[str, str]) -> ChatTemplate | None:
        """The template of a model directory: chat_template.jinja first, else tokenizer_config.json's."""
        sources: dict[str, str] = {}
        written = config.get("chat_template")
        if isinstance(written, str):
            sources = {"default": written}
        elif isinstance(written, list):
            sources = {entry["name"]: entry["template"] for entry in written}
        path = model / "chat_template.jinja"
        if path.is_file():
            sources = {"default": path.read_text(encoding="utf-8")}
            for extra in sorted((model / "additional_chat_templates").glob("*.jinja")):
                sources[extra.stem] = extra.read_text(encoding="utf-8")
        return cls(sources, special_tokens) if sources else None

    def render(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None,
        add_generation_prompt: bool,
        template_kwargs: dict[str, Any],
    ) -> str:
        """The chat as text. Raises InvalidRequest, with the template's message, if it refuses the chat."""
        name = "tool_use" if tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest(f"this model has no default chat template, only {sorted(self._templates)}")
        try:
            return self._templates[name].render(
                **{
                    **self._special_tokens,
                    **template_kwargs,
                    "messages": [_as_templates_expect(message) for message in messages],
                    "tools": tools,
                    "documents": template_kwargs.get("documents"),
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            raise InvalidRequest(f"the chat template refused these messages: {error}", "messages") from None


def _as_templates_expect(message: dict[str, Any]) -> dict[str, Any]:
    """The message without nulls (templates test `is defined`), and with its reasoning under two names."""
    present = {key: value for key, value in message.items() if value is not None}
    for name in _REASONING_NAMES:
        if name in present:
            return {"thinking": present[name], **present, "reasoning_content": present[name]}
    return present


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training; it has no effect here."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own declaration is not a ClassVar

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.Scope(body, lineno=line)


class _Namespace(jinja2.utils.Namespace):
    """jinja2's namespace without names with a leading underscore, which were a way out of the sandbox."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        self, rest = args[0], args[1:]
        values = dict(*rest, **kwargs)
        for name in values:
            _refuse_underscore(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_underscore(name)
        jinja2.utils.Namespace.__setitem__(self, name, value)


def _refuse_underscore(name: str) -> None:
    if name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template may not set {name!r}")


class _Dict:
    """`dict(...)` for templates, without the class itself and what can be reached from it."""

    def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
        return dict(*args, **kwargs)

    def fromkeys(self, keys: Any, value: Any = None) -> dict[Any, Any]:
        return dict.fromkeys(keys, value)


def _environment() -> jinja2.Environment:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals.update(
        raise_exception=_raise_exception, strftime_now=_strftime_now, dict=_Dict(), namespace=_Namespace
    )
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without HTML escapes, which jinja2's own filter adds: models are trained on plain JSON."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # local time
