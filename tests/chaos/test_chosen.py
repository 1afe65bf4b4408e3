"""Ten scenarios of the matrix that `make chaos` plays whole: a minute of `make test`.

Times are measured by `make chaos`, not asserted here.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.bench import Bench
from tests.chaos.matrix import FAULTS, ROLES, Cell, cells, why_not
from tests.chaos.states import STATES

CHOSEN = {
    ("shm", "fake"): (
        ("D", "decoding", "kill"),
        ("P", "transferring", "kill"),
        ("D", "waiting", "stop"),
        ("P", "between chunks", "thaw"),
    ),
    ("tcp", "fake"): (
        ("router", "queued", "lossy"),
        ("P", "last chunk", "partition P-D"),
        ("D", "bootstrap", "partition router-worker"),
        ("directory", "decoding", "stop"),
    ),
    ("mooncake", "tiny"): (
        ("P", "first chunk", "abort"),
        ("D", "decoding", "kill"),
    ),
}
REST = pytest.mark.invariants
_TRIES = 3  # on a machine that is busy a state may pass before it is seen


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, id=" ".join(kind), marks=REST if kind[0] == "tcp" else ()) for kind in CHOSEN],
)
def test_streams_survive(kind: tuple[str, str], tmp_path: Path) -> None:
    missed = []
    with Bench(tmp_path, seed=7) as bench:
        for number, chosen in enumerate(CHOSEN[kind]):
            for attempt in range(_TRIES):
                outcome = bench.play(Cell(*chosen, *kind), 10 * number + attempt)
                if not outcome.missed:
                    break
            assert outcome.problems == [], f"{outcome.cell}"
            if outcome.missed:
                missed.append(outcome.cell)
    assert missed == []


def test_every_cell_exists_or_has_a_reason_not_to() -> None:
    every = [(role, state, fault) for role in ROLES for state in STATES for fault in FAULTS]
    existing = {cell[:3] for _, cell in zip(range(3 * len(every)), cells(1), strict=False)}
    assert {cell for cell in every if why_not(*cell) is None} == existing
    assert len(existing) > 200


def test_one_cell_can_be_asked_for() -> None:
    found = next(cells(5, "D/decoding/kill/tcp/fake"))
    assert found == Cell("D", "decoding", "kill", "tcp", "fake")
    with pytest.raises(ValueError, match="not at an end"):
        next(cells(5, "directory/queued/partition P-D"))
