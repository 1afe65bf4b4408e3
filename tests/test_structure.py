"""Rules about all shipped code: names of classes, their size, and the words of docs/vocabulary.md."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache

from tools.shipped import ROOT, shipped_files

MOST_METHODS = 20

RETIRED = {
    r"(Prefill|Decode|Role|Other|My)Half|\b(prefill|decode|sending|receiving) half\b": "role",
    r"twins?": "reference",
    r"melt(s|ed|ing)?": "project",
    r"roster": "request table",
    r"announcer": "heartbeat",
    r"repeater": "retransmitter",
    r"calm_collector": "freeze_gc",
    r"sequence_?repair": "event ordering",
    r"deciding group": "primary group",
    r"_?homeless": "unplaced",
    r"DESIGN section": "a page of docs/",
}
"""Words that the code no longer uses, as patterns, and what replaced them."""

RETIRED_CLASSES = {"Side", "Account", "Given", "Try", "Heard", "Surroundings", "Gaps"}


@cache
def classes() -> list[tuple[str, ast.ClassDef]]:
    """(file, class) of every class at the top of a shipped module."""
    return [
        (name, node)
        for name in shipped_files(".py")
        for node in ast.parse((ROOT / name).read_text()).body
        if isinstance(node, ast.ClassDef)
    ]


def test_no_two_public_classes_have_one_name() -> None:
    where = defaultdict(list)
    for file, node in classes():
        if not node.name.startswith("_"):
            where[node.name].append(file)
    assert {name: files for name, files in where.items() if len(files) > 1} == {}


def test_classes_are_small() -> None:
    large = {}
    for file, node in classes():
        methods = [one for one in node.body if isinstance(one, ast.FunctionDef | ast.AsyncFunctionDef)]
        if len(methods) > MOST_METHODS:
            large[f"{file}: {node.name}"] = len(methods)
    assert large == {}


def test_retired_names_of_classes_are_gone() -> None:
    assert [f"{file}: {node.name}" for file, node in classes() if node.name in RETIRED_CLASSES] == []


def test_retired_words_are_gone() -> None:
    files = shipped_files(".py", ".h", ".cpp") + [
        str(path.relative_to(ROOT))
        for folder, pattern in (("docs", "**/*.md"), ("bench", "**/*.*"), ("tools", "*.*"), (".", "*.md"))
        for path in sorted((ROOT / folder).glob(pattern))
        if path.suffix in (".md", ".py", ".h", ".cpp", ".sh")
    ]
    assert list(_retired(files)) == []


def _retired(files: list[str]) -> Iterator[str]:
    # A word ends where its letters end; `_` and a change of case separate words in an identifier.
    patterns = {
        re.compile(rf"(?<![A-Za-z])(?:{word})(?![a-z])", re.IGNORECASE if word.islower() else 0): instead
        for word, instead in RETIRED.items()
    }
    for name in files:
        for number, line in enumerate((ROOT / name).read_text().splitlines(), 1):
            for pattern, instead in patterns.items():
                if found := pattern.search(line):
                    yield f"{name}:{number}: {found.group()!r} is now {instead!r}"
