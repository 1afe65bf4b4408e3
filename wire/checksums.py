"""Which pages of a hand-off are compared with what was sent, and by which checksums."""

from __future__ import annotations

from enum import StrEnum

import msgspec


class ChecksumMode(StrEnum):
    """Which pages of a hand-off are compared with what was sent."""

    NONE = "none"
    SAMPLED = "sampled"
    ALL = "all"

    @property
    def is_on(self) -> bool:
        """Whether anything is compared."""
        return self is not ChecksumMode.NONE

    def stricter(self, other: ChecksumMode) -> ChecksumMode:
        """That of the two modes which checks more."""
        return max(self, other, key=list(ChecksumMode).index)


class PageChecksums(msgspec.Struct, frozen=True):
    """CRC-32 checksums by group. `mode` says what they cover (kvtransfer/checksum.py)."""

    mode: ChecksumMode = ChecksumMode.NONE
    sums: dict[str, list[int]] = {}


NO_CHECKSUMS = PageChecksums()
