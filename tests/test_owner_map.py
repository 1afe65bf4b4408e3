"""docs/owner-map.md says of every name of the owner's documents where it is.

What is `done` exists, and shipped code outside its own definition uses it: tests do not count.
"""

from __future__ import annotations

import ast
import fnmatch
import re
import tomllib
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

from kvcache.storage.factory import _STORES
from tools.shipped import ROOT, shipped_files

MAP = ROOT / "docs" / "owner-map.md"
NAMES = ROOT / "tests" / "data" / "owner_names.txt"
STATE = re.compile(r"done|coming|not needed: .+")


@dataclass(frozen=True)
class Row:
    name: str
    documents: str
    where: str
    state: str


def rows() -> list[Row]:
    found = []
    for line in MAP.read_text().splitlines():
        if line.startswith("| `"):
            cells = [cell.strip() for cell in line.strip("|").split("|")]
            assert len(cells) == 4, line
            found.append(Row(cells[0].strip("`"), *cells[1:]))
    return found


@cache
def definitions(path: Path) -> dict[str, frozenset[str]]:
    """Module-level names of a file; for each class the names it defines, else an empty set."""
    defined: dict[str, frozenset[str]] = {}
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.ClassDef):
            defined[node.name] = frozenset(_members(node))
        else:
            defined.update(dict.fromkeys(_named(node), frozenset()))
    return defined


def _members(node: ast.ClassDef) -> set[str]:
    """Methods, fields and attributes that a method gives to self."""
    assigned = {
        inner.attr
        for inner in ast.walk(node)
        if isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store)
        if isinstance(inner.value, ast.Name) and inner.value.id == "self"
    }
    return assigned.union(*(_named(child) for child in node.body))


def _named(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
    return [target.id for target in targets if isinstance(target, ast.Name)]


def missing(where: str) -> str:
    """Why `path: Symbol` does not resolve; empty when it does."""
    match = re.fullmatch(r"`([\w/]+\.py): (\w+)(?:\.(\w+))?`", where)
    if not match:
        return f"{where} is not `path: Symbol`"
    path, symbol, member = match.groups()
    if not (ROOT / path).is_file():
        return f"{path} does not exist"
    defined = definitions(ROOT / path)
    if symbol not in defined:
        return f"{path} defines no {symbol}"
    return f"{path}: {symbol} has no {member}" if member and member not in defined[symbol] else ""


@dataclass(frozen=True)
class Reads:
    """What code reads by name: where it runs when a module is imported, and per function by its name."""

    at_import: set[str]
    in_functions: dict[str, set[str]]

    def collect(self, node: ast.AST, into: set[str]) -> None:
        """Add variables and attributes that are read in a tree. An import alone reads nothing."""
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            into.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            into.add(node.attr)
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                self.collect(child, self._body_of(child))
            else:
                self.collect(child, into)

    def _body_of(self, function: ast.FunctionDef | ast.AsyncFunctionDef) -> set[str]:
        """Python calls `__init__` and the like; a decorator may register the function somewhere."""
        registered = any(not _is_builtin(decorator) for decorator in function.decorator_list)
        if registered or re.fullmatch(r"__\w+__", function.name):
            return self.at_import
        return self.in_functions.setdefault(function.name, set())


def _is_builtin(decorator: ast.expr) -> bool:
    """Whether a decorator only changes how a function is called."""
    return re.split(r"[.(]", ast.unparse(decorator))[-1] in (
        "property", "cached_property", "staticmethod", "classmethod", "abstractmethod", "cache",
    )  # fmt: skip


def frameworks_call() -> list[str]:
    """Patterns of names that frameworks call or reports contain: the list that vulture has, too."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    return list(project["tool"]["vulture"]["ignore_names"])


@cache
def reached() -> frozenset[str]:
    """Names that shipped code reads, where it can be reached itself: called by name, from what is reached."""
    reads = Reads(set(), {})
    for path in shipped_files(".py"):
        reads.collect(ast.parse((ROOT / path).read_text()), reads.at_import)
    called = frameworks_call()
    found: set[str] = set()
    fresh = reads.at_import.union(called, *(fnmatch.filter(reads.in_functions, one) for one in called))
    while fresh:
        found |= fresh
        fresh = set().union(*(reads.in_functions.get(name, set()) for name in fresh)) - found
    return frozenset(found)


def last_name(where: str) -> str:
    """The name by which code uses `path: Symbol.member`."""
    *owner, last = where.strip("`").rpartition(" ")[2].split(".")
    return owner[-1] if last == "__init__" else last


def test_every_name_has_exactly_one_row() -> None:
    mapped = [row.name for row in rows()]
    assert len(mapped) == len(set(mapped))
    wanted = NAMES.read_text().split("\n")[:-1]
    assert len(wanted) > 110
    assert set(mapped) == set(wanted)


def test_what_is_done_is_there() -> None:
    problems = [f"{row.name}: {why}" for row in rows() if row.state == "done" and (why := missing(row.where))]
    assert not problems, "\n".join(problems)


def test_what_is_done_is_used() -> None:
    used = reached()
    places = {row.where for row in rows() if row.state == "done" and not row.where.startswith("`tests/")}
    assert {where for where in places if last_name(where) not in used} == set()


def test_what_is_coming_is_not_there() -> None:
    there = {name for path in shipped_files(".py") for name in definitions(ROOT / path)} | _STORES.keys()
    coming = {row.name for row in rows() if row.state == "coming"}
    assert {name for name in coming if {name, name.partition("_")[0]} & there} == set()


def test_each_row_says_its_documents_and_a_known_state() -> None:
    for row in rows():
        assert re.fullmatch(r"[1-5](, [1-5])*", row.documents), row
        assert STATE.fullmatch(row.state), row
        assert row.where or row.state.startswith("not needed"), row


@pytest.mark.parametrize(
    "where",
    [
        "`wire/no_such_file.py: RequestStage`",
        "`wire/stages.py: NoSuchClass`",
        "`wire/stages.py: RequestStage.NO_SUCH_STAGE`",
        "wire/stages.py",
    ],
)
def test_a_wrong_place_is_found(where: str) -> None:
    assert missing(where)
