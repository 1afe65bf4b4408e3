"""Which cases of a test stand for all: as few as have each value of each parameter at least once."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import pytest

MARK = "covering"
_ELSEWHERE = ("oracle_full", "invariants", "emulated")
"""Marks of what `make test` does not run."""


def leave_out(items: Iterable[pytest.Item]) -> None:
    """Of every test marked `covering`, give the cases that no value needs the mark of the target that runs
    them: the mark's argument, or `oracle_full`."""
    cases: dict[tuple[str, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker(MARK) and _is_in_make_test(item):
            cases.setdefault((item.module.__name__, item.originalname), []).append(item)
    for each in cases.values():
        chosen = cover([_values(case) for case in each])
        for number, case in enumerate(each):
            if number not in chosen:
                mark = case.get_closest_marker(MARK)
                assert mark is not None, "looked for above"
                case.add_marker(mark.args[0] if mark.args else "oracle_full")


def _is_in_make_test(item: pytest.Item) -> bool:
    return not any(item.get_closest_marker(mark) for mark in _ELSEWHERE)


def cover(rows: Sequence[frozenset[Hashable]]) -> set[int]:
    """Numbers of rows that have all values of all rows between them: each the one that adds most to those
    before it, the first of equals."""
    missing = frozenset[Hashable]().union(*rows)
    chosen: set[int] = set()
    while missing:
        best = max(range(len(rows)), key=lambda number: len(missing & rows[number]))
        chosen.add(best)
        missing -= rows[best]
    return chosen


def _values(case: pytest.Function) -> frozenset[Hashable]:
    """Parameters that are given together are one, and values are told apart by identity: a list of them is
    the same for all cases."""
    params = dict(case.callspec.params) if hasattr(case, "callspec") else {}
    values: set[Hashable] = set()
    for mark in case.iter_markers("parametrize"):
        names = mark.args[0]
        together = (
            tuple(name.strip() for name in names.split(",")) if isinstance(names, str) else tuple(names)
        )
        values.add((together, tuple(id(params.pop(name)) for name in together)))
    values.update(((name,), (id(value),)) for name, value in params.items())
    return frozenset(values)
