"""What the demo model learns: functions and methods of Python's standard library and their docstrings.

Everything is read from the running interpreter; nothing is stored here but the list of modules.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass

from tools.demo_text import first_sentence, one_line, sentences

MAX_WORDS = 40
MIN_WORDS = 4

# Where the functions of `os`, `os.path` and `open` are defined.
_SHARED_HOMES = frozenset({"posix", "posixpath", "genericpath", "io"})

# A first paragraph that only shows how the function is called is not an answer.
_SIGNATURE = re.compile(r"[\w.]+\([^\n]*\)[^\n]*$")

MODULES: tuple[str, ...] = (
    "builtins", "os", "os.path", "math", "statistics", "random", "shutil", "json", "re", "string",
    "textwrap", "difflib", "itertools", "functools", "collections", "heapq", "bisect", "datetime",
    "time", "glob", "fnmatch", "tempfile", "copy", "pickle", "html", "urllib.parse", "gzip", "csv",
    "io", "subprocess", "threading", "hashlib", "hmac", "secrets", "base64", "shlex",
)  # fmt: skip
"""Modules whose public functions are learned."""

CLASSES: tuple[str, ...] = (
    "builtins.str", "builtins.list", "builtins.dict", "builtins.set", "builtins.tuple",
    "builtins.int", "builtins.float", "pathlib.Path", "collections.deque", "collections.Counter",
    "datetime.date", "datetime.datetime", "threading.Thread", "queue.Queue", "subprocess.Popen",
    "re.Pattern", "re.Match",
)  # fmt: skip
"""Classes whose own public methods are learned."""


@dataclass(frozen=True)
class Function:
    """One function or method: how a person writes it, where it lives, and what its docstring says first."""

    name: str
    """Qualified name, `os.path.join` or `datetime.date.today`; of built-in types `str.split`."""
    answer: str
    """The first one or two sentences of the docstring, at most MAX_WORDS words, on one line."""

    @property
    def owner(self) -> str:
        """The module or class it belongs to; empty for a built-in function."""
        return self.name.rpartition(".")[0]

    @property
    def attribute(self) -> str:
        return self.name.rpartition(".")[2]


def trained_functions() -> list[Function]:
    """Every function the demo model learns, sorted by name. Raises ValueError when fewer than 600."""
    found: dict[str, Function] = {}
    for name, value in [*_functions(), *_methods()]:
        answer = _answer(value)
        if answer is not None:
            found.setdefault(name, Function(name, answer))
    if len(found) < 600:
        raise ValueError(f"only {len(found)} functions with a usable docstring; at least 600 are needed")
    return [found[name] for name in sorted(found)]


def _functions() -> Iterator[tuple[str, object]]:
    """(qualified name, function) of each module's own public functions."""
    for module_name in MODULES:
        module = importlib.import_module(module_name)
        public = getattr(module, "__all__", None) or [
            name for name in vars(module) if not name.startswith("_")
        ]
        for name in sorted(set(public)):
            value = getattr(module, name, None)
            if inspect.isroutine(value) and _at_home(value, module_name):
                yield f"{module_name}.{name}".removeprefix("builtins."), value


def _methods() -> Iterator[tuple[str, object]]:
    """(qualified name, function) of each class's own public methods."""
    for class_name in CLASSES:
        module_name, _, name = class_name.rpartition(".")
        members = vars(getattr(importlib.import_module(module_name), name))
        for attribute, method in sorted(members.items()):
            function = method.__func__ if isinstance(method, classmethod | staticmethod) else method
            if not attribute.startswith("_") and inspect.isroutine(function):
                yield f"{class_name}.{attribute}".removeprefix("builtins."), function


def _at_home(value: object, module_name: str) -> bool:
    """Whether `value` was defined for this module: `_heapq` serves heapq; re-exports do not count."""
    home = getattr(value, "__module__", None)
    if not isinstance(home, str):
        return True
    top = home.strip("_").partition(".")[0]
    return top == module_name.partition(".")[0] or top in _SHARED_HOMES


def _answer(value: object) -> str | None:
    """The start of a docstring that reads as prose, or None."""
    paragraphs = (inspect.getdoc(value) or "").split("\n\n")
    while len(paragraphs) > 1 and _SIGNATURE.match(paragraphs[0]):
        del paragraphs[0]
    paragraph = paragraphs[0]
    if not paragraph.isascii() or any(mark in paragraph for mark in ("->", ">>>", "\\")):
        return None
    kept = ""
    for sentence in sentences(paragraph)[:2]:
        longer = one_line(f"{kept} {sentence}")
        if len(longer.split()) > MAX_WORDS:
            break
        kept = longer
    first = first_sentence(kept)
    prose = first[:1].isupper() and "(" not in first.split(" ")[0]
    return kept if prose and len(first.split()) >= MIN_WORDS else None
