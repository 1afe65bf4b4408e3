"""docs/owner-map.md says of every name of the owner's documents where it is, and says the truth."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
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


def test_every_name_has_exactly_one_row() -> None:
    mapped = [row.name for row in rows()]
    assert len(mapped) == len(set(mapped))
    wanted = NAMES.read_text().split("\n")[:-1]
    assert len(wanted) > 110
    assert set(mapped) == set(wanted)


def test_what_is_done_is_there() -> None:
    problems = [f"{row.name}: {why}" for row in rows() if row.state == "done" and (why := missing(row.where))]
    assert not problems, "\n".join(problems)


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
