"""Text that the demo model never saw: docstrings of standard library modules it was not trained on."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import dataclass

from tools.demo_functions import CLASSES, MODULES, trained_functions
from tools.demo_questions import docstring_corpus
from tools.demo_text import one_line

HELD_OUT_MODULES: tuple[str, ...] = (
    "argparse", "ast", "asyncio", "calendar", "cmath", "codecs", "concurrent.futures", "configparser",
    "contextlib", "decimal", "dis", "email.message", "enum", "fractions", "ftplib", "gettext", "http.client",
    "http.cookies", "http.server", "imaplib", "inspect", "ipaddress", "locale", "logging", "mailbox",
    "mimetypes", "multiprocessing.pool", "numbers", "optparse", "pdb", "platform", "plistlib", "pprint",
    "pstats", "sched", "selectors", "shelve", "signal", "smtplib", "socket", "socketserver", "sqlite3", "ssl",
    "struct", "symtable", "sys", "sysconfig", "tarfile", "tokenize", "trace", "traceback", "types",
    "unittest", "unittest.mock", "urllib.request", "uuid", "warnings", "weakref", "xml.dom.minidom",
    "xml.etree.ElementTree", "zipfile", "zlib",
)  # fmt: skip
"""None of them is among tools.demo_functions.MODULES, nor the home of one of its CLASSES."""

MIN_WORDS = 5


@dataclass(frozen=True)
class Docstring:
    """Of one public function, class or method: its qualified name and the whole text on one line."""

    name: str
    text: str


def held_out_docstrings() -> list[Docstring]:
    """All of them, by name, each text once; none of it was an answer or a part of a question in training."""
    trained = set(MODULES) | {name.rpartition(".")[0] for name in CLASSES}
    assert not trained & set(HELD_OUT_MODULES), "a module that was trained on is not held out"
    seen = {one_line(text) for text in docstring_corpus()}
    answers = [function.answer for function in trained_functions()]
    found: list[Docstring] = []
    for name, value in sorted(_documented(), key=lambda pair: pair[0]):
        text = one_line(inspect.getdoc(value) or "")
        if not text.isascii() or len(text.split()) < MIN_WORDS or text in seen:
            continue
        seen.add(text)
        if not any(answer in text for answer in answers):
            found.append(Docstring(name, text))
    return found


def _documented() -> Iterator[tuple[str, object]]:
    for module_name in HELD_OUT_MODULES:
        module = importlib.import_module(module_name)
        for name, value in vars(module).items():
            if name.startswith("_") or getattr(value, "__module__", None) != module_name:
                continue
            yield f"{module_name}.{name}", value
            if inspect.isclass(value):
                for attribute, member in vars(value).items():
                    if not attribute.startswith("_") and inspect.isroutine(member):
                        yield f"{module_name}.{name}.{attribute}", member
