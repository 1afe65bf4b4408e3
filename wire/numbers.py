"""Numbers on the wire, with bounds that are checked on decode.

Receivers add to what they get and send it on. MessagePack has no integer of more than 64 bits, so without a
bound one number of a faulty peer would end the thread that encodes the sum. No honest number comes near it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

Natural = Annotated[int, msgspec.Meta(ge=0, le=2**63 - 1)]
"""A count, a position, an index or a name."""
Positive = Annotated[int, msgspec.Meta(ge=1, le=2**63 - 1)]
"""A size by which others divide."""
Signed = Annotated[int, msgspec.Meta(ge=-(2**62), lt=2**62)]
Quantity = Annotated[float, msgspec.Meta(ge=0, le=1e15)]
"""A rate or a duration: neither infinite nor NaN, so that what is computed from it has an order."""
