"""Cases that stand for all of a test's."""

from __future__ import annotations

from itertools import product

import pytest

from tests.support.covering import cover

pytest_plugins = ["pytester"]

CASES = """
import pytest

@pytest.fixture(params=["x", "y"])
def letter(request):
    return request.param

@pytest.mark.covering
@pytest.mark.parametrize(("a", "b"), [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize("c", [7, 8, pytest.param(9, marks=pytest.mark.invariants)])
def test_many(a, b, c, letter):
    pass

@pytest.mark.covering("invariants")
@pytest.mark.parametrize("a", [1, 2])
@pytest.mark.parametrize("b", [1, 2])
def test_four(a, b):
    pass

def test_one():
    pass
"""


def test_each_value_is_in_a_row_that_is_chosen() -> None:
    rows = [frozenset(enumerate(row)) for row in product("ab", "cde", "fg")]
    chosen = cover(rows)
    assert frozenset().union(*(rows[number] for number in chosen)) == frozenset().union(*rows)
    assert len(chosen) == 3
    assert cover([]) == set()


def test_the_rest_is_left_to_other_targets(pytester: pytest.Pytester) -> None:
    pytester.makeconftest(
        "import pytest\n"
        "from tests.support.covering import leave_out\n"
        "@pytest.hookimpl(tryfirst=True)\n"
        "def pytest_collection_modifyitems(items):\n"
        "    leave_out(items)\n"
    )
    pytester.makeini("[pytest]\nmarkers =\n covering\n oracle_full\n invariants\n")
    path = pytester.makepyfile(CASES)

    def count(markers: str, name: str) -> int:
        return pytester.runpytest_inprocess("-m", markers, "-k", name, str(path)).parseoutcomes()["passed"]

    assert count("not oracle_full and not invariants", "test_many") == 3
    assert count("oracle_full", "test_many") == 2 * 3 * 2 - 3
    assert count("invariants", "test_many") == 6
    assert count("not oracle_full and not invariants", "test_four") == 2
    assert count("invariants", "test_four") == 2
    assert count("not oracle_full and not invariants", "test_one") == 1
