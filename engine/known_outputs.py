"""Outputs of a sequence that is sampled before the result of its last step has been taken."""

from __future__ import annotations

from collections.abc import Sequence

from engine.errors import NothingAllowed


def known_outputs(
    outputs: Sequence[int], start: int, end: int, position: int, newest: int | None
) -> list[int]:
    """Those from `start` up to `end`, of a sequence that is about to be sampled at `position`, not before
    `end`.

    `outputs` may lack the token before `position`, which is `newest` then. Raises NothingAllowed if others
    are not known.
    """
    known = list(outputs[start:end])
    if len(known) < end - start:
        if newest is None or len(outputs) != position - 1:
            raise NothingAllowed("the tokens before this position are not known")
        known.append(newest)
    return known
