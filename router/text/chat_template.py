"""Chat templates: a sandboxed Jinja environment with the helpers that models' templates use.

Templates come with models and are not trusted: the sandbox is immutable, templates get only plain data parsed
from JSON, and names with a leading underscore are refused.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
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
from router.text.chat import Chat
from router.text.messages import (
    END_OF_CONTENT,
    TemplateNeeds,
    as_templates_expect,
    in_plainer_form,
    up_to_content,
    with_all_fields,
)
from router.text.template_marks import TemplateMarks

# What a template is given under these names is not the request's to replace. (A template of the request's own
# is refused, too: templates come from the operator.)
_RESERVED = ("messages", "tools", "add_generation_prompt", "strftime_now", "chat_template")
_LONGEST_REASON = 500  # characters: a template may repeat what it was given
_TEMPLATE_ERRORS = (
    jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError
)  # fmt: skip


class ChatTemplate:
    """A model's chat template, or several by name: "default", and "tool_use" for chats with tools."""

    def __init__(self, sources: dict[str, str], special_tokens: dict[str, str], marks: TemplateMarks) -> None:
        """`sources` are by name. Raises ConfigError if a template does not compile."""
        environment = _environment()
        self._marks = marks
        self._reserved = {*_RESERVED, *special_tokens, *environment.globals}
        self._special_tokens = special_tokens
        self._marked_tokens = {name: marks.marked(token) for name, token in special_tokens.items()}
        self._templates: dict[str, _Compiled] = {}
        for name, source in sources.items():
            try:
                self._templates[name] = _Compiled.make(environment, source, marks, special_tokens)
            except jinja2.TemplateError as error:
                raise ConfigError(
                    "model", f"its chat template {name!r} does not compile ({error})", "repair it"
                ) from None

    def is_plain(self, chat: Chat) -> bool:
        """Whether the chat's template only puts texts behind one another (TemplateMarks.is_plain)."""
        return self._choose(chat).plain

    def render(self, chat: Chat) -> str:
        """The chat as text. Raises InvalidRequest, with the template's message, if it refuses the chat."""
        template = self._choose(chat)
        return self._render(template, template.usual, chat, self._special_tokens)

    def separate(self, chat: Chat, rendered: str) -> list[str] | None:
        """A rendered chat: in turn a text and a control token that the template wrote. None if the template
        does something else when its texts are marked."""
        template = self._choose(chat)
        try:
            marked = self._render(template, template.marked, chat, self._marked_tokens)
        except InvalidRequest:
            return None
        parts = self._marks.split(marked)
        return parts if "".join(parts) == rendered else None

    def _choose(self, chat: Chat) -> _Compiled:
        name = "tool_use" if chat.tools is not None and "tool_use" in self._templates else "default"
        if name not in self._templates:
            raise InvalidRequest(f"this model has no default chat template, only {sorted(self._templates)}")
        return self._templates[name]

    def _render(
        self, chosen: _Compiled, template: jinja2.Template, chat: Chat, special_tokens: dict[str, str]
    ) -> str:
        for name in chat.template_kwargs:
            if name in self._reserved:
                raise InvalidRequest(f"{name!r} is not the request's to set", "chat_template_kwargs")
        messages = as_templates_expect(chat.messages, chosen.needs)
        if chat.continues:
            messages[-1] = {**messages[-1], "content": messages[-1]["content"] + END_OF_CONTENT}
        given = {
            **special_tokens,
            **chat.template_kwargs,
            "messages": messages,
            "tools": chat.tools,
            "documents": chat.template_kwargs.get("documents"),
            "add_generation_prompt": chat.add_generation_prompt,
            "strftime_now": chat.arrived.strftime,
        }
        try:
            rendered = _render_in_some_form(template, given)
        except _TEMPLATE_ERRORS as error:
            raise InvalidRequest(
                f"the chat template refused these messages: {str(error)[:_LONGEST_REASON]}", "messages"
            ) from None
        return up_to_content(rendered) if chat.continues else rendered


@dataclass(frozen=True, slots=True)
class _Compiled:
    """One template, as it is and marked (template_marks.py)."""

    usual: jinja2.Template
    marked: jinja2.Template
    plain: bool
    needs: TemplateNeeds

    @classmethod
    def make(
        cls,
        environment: jinja2.Environment,
        source: str,
        marks: TemplateMarks,
        special_tokens: dict[str, str],
    ) -> _Compiled:
        parsed = environment.parse(source)
        plain = marks.is_plain(parsed)
        constants = (node.value for node in parsed.find_all(jinja2.nodes.Const))
        words = frozenset(value for value in constants if isinstance(value, str) and value.isidentifier())
        tests = parsed.find_all((jinja2.nodes.Test, jinja2.nodes.Compare))
        asks_for_none = any(_asks_for_none(test) for test in tests)
        sums = parsed.find_all((jinja2.nodes.Add, jinja2.nodes.Concat))
        asked = any(_is_arguments(test.node) for test in parsed.find_all(jinja2.nodes.Test))
        joins = not asked and any(_is_arguments(part) for one in sums for part in one.iter_child_nodes())
        usual, marked = environment.from_string(source), environment.from_string(marks.mark(parsed))
        given = {**special_tokens, "tools": None, "documents": None, "add_generation_prompt": True}
        left_out, later = (
            frozenset(
                role
                for role in ("system", "developer")
                if (role == "system" or role in words)
                and _has_all(usual, given, before)
                and not _has_all(usual, given, [*before, role])
            )
            for before in (["system"], ["system", "user"])
        )
        return cls(usual, marked, plain, TemplateNeeds(words, asks_for_none, joins, left_out, later))


def _render_in_some_form(template: jinja2.Template, given: dict[str, Any]) -> str:
    """The chat as text: as it is, or else in a plainer form. Raises the first failure."""
    try:
        return template.render(given)
    except _TEMPLATE_ERRORS:
        for plainer in _plainer_forms(given):
            with suppress(*_TEMPLATE_ERRORS):
                return template.render(plainer)
        raise


def _plainer_forms(given: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if given["tools"]:
        given = {**given, "tools": with_all_fields(given["tools"])}
        yield given
    yield {**given, "messages": in_plainer_form(given["messages"])}


def _has_all(template: jinja2.Template, given: dict[str, Any], roles: list[str]) -> bool:
    """Whether a chat with messages of these roles, and a user's last, has the texts of all of them."""
    messages = [{"role": role, "content": f"probe-{number}"} for number, role in enumerate([*roles, "user"])]
    try:
        rendered = template.render(given, messages=messages, strftime_now=datetime.now().strftime)
    except _TEMPLATE_ERRORS:
        return False
    return all(message["content"] in rendered for message in messages)


def _asks_for_none(test: jinja2.nodes.Expr) -> bool:
    """`message.content is none`, `message['content'] != None`, and the same for a variable named content."""
    match test:
        case jinja2.nodes.Test(name="none", node=subject):
            pass
        case jinja2.nodes.Compare(
            expr=subject, ops=[jinja2.nodes.Operand(expr=jinja2.nodes.Const(value=None))]
        ):
            pass
        case _:
            return False
    match subject:
        case jinja2.nodes.Getattr(attr="content") | jinja2.nodes.Name(name="content"):
            return True
        case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="content")):
            return True
        case _:
            return False


def _is_arguments(node: jinja2.nodes.Node) -> bool:
    """`call.arguments`, `call['arguments']`, as DeepSeek's templates join with other texts."""
    match node:
        case jinja2.nodes.Getattr(attr="arguments"):
            return True
        case jinja2.nodes.Getitem(arg=jinja2.nodes.Const(value="arguments")):
            return True
        case _:
            return False


def load_templates(model: Path, config: dict[str, Any]) -> dict[str, str]:
    """The templates of a model directory by name: chat_template.jinja first, else tokenizer_config.json's."""
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
    return sources


def template_text(given: str) -> str:
    """A template's text, which has braces or lines, or that of the file which is named. Raises ConfigError if
    there is none."""
    if "{" in given or "\n" in given:
        return given
    try:
        return Path(given).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError("chat_template", f"{given} cannot be read ({error})", "name a Jinja file") from None


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
    environment.globals.update(raise_exception=_raise_exception, dict=_Dict(), namespace=_Namespace)
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
