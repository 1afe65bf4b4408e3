"""Every mutant can still be put in: its old text is there once, and its tests exist."""

from __future__ import annotations

import ast
from collections import Counter

from tests.mutants.curated import MUTANTS
from tests.mutants.mutant import ROOT


def test_every_mutant_can_be_put_in() -> None:
    """If you have changed such a line, change the mutant to the same fault in the new text; if the line is
    gone, so is the mutant."""
    rotten = []
    for mutant in MUTANTS:
        try:
            spoilt = mutant.spoilt((ROOT / mutant.path).read_text())
            if mutant.path.endswith(".py"):
                ast.parse(spoilt)
        except (OSError, ValueError, SyntaxError) as error:
            rotten.append(f"{mutant}: {error}")
    assert not rotten, "\n".join(rotten)


def test_their_tests_exist() -> None:
    for name in sorted({test for mutant in MUTANTS for test in mutant.tests}):
        path, _, case = name.partition("::")
        function = case.partition("[")[0]
        assert f"def {function}(" in (ROOT / path).read_text() if function else (ROOT / path).exists(), name


def test_there_are_a_hundred_over_all_rooms() -> None:
    rooms = Counter(mutant.path.partition("/")[0] for mutant in MUTANTS)
    assert {"wire", "kvcache", "engine", "scheduler", "kvtransfer", "worker", "router"} <= set(rooms)
    assert {"prefill_node", "decode_node"} <= set(rooms)
    assert len(MUTANTS) == len({(mutant.path, mutant.old, mutant.new) for mutant in MUTANTS}) >= 100
