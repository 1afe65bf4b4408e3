"""What it costs to move KV between two workers, by where they are, as finished transfers have shown.

A *kind* of transfer is (locality, backend). D measures each transfer: bytes, and the seconds in which some of
them were being written. The price of a kind is in the policy's unit (waits for one queued prompt token), for
one prompt token that D lacks:

    prior(kind)    = transfer times the share of its locality (same_host, same_machine, same_rack; else 1)
    measured(kind) = seconds / bytes of its transfers, times bytes per token, times P's prompt tokens a second
    scale          = the mean of measured / prior over all kinds, each with its number of transfers
    price(kind)    = the mean of prior times scale and of measured

In both means, which are geometric, the prior counts as PRIOR_TRANSFERS transfers: prices differ by factors of
1,000, and an arithmetic mean would be the greater one's. So a kind that nobody has seen is as much dearer
than a known one as the priors say, and what is measured wins as transfers come. A pair of workers whose own
transfers differ from their kind's by more than OWN_PRICE has a price of its own. Transfers count less with
age: a kind that was slow once is tried again.

Knows no clock: time is passed in. Belongs to one thread.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from router.placement_options import PolicyWeights
from wire.records import Role, WorkerRecord

PRIOR_TRANSFERS = 8.0  # that a prior is worth
OWN_PRICE = 2.0  # a pair this many times dearer or cheaper than its kind has its own price
_WINDOW = 64.0  # transfers over which a mean is taken
_HALF_LIFE_S = 300.0
_REFRESH_S = 1.0  # between two versions of the prices
_MOST_PAIRS = 4096  # whose own transfers are remembered
_LEAST_TRANSFERS = 0.01  # below, a mean is forgotten
_OF_ONE_HOST = ("cuda_ipc", "shm")  # backends that need one host
_BOUNDED = ("window", "state")  # kinds of KV groups that do not grow with the prompt


class Locality(IntEnum):
    """How near two workers are to each other, nearest first."""

    HOST = 0  # shared memory works between them, and CUDA IPC where they have GPUs
    MACHINE = 1  # one machine, in different containers
    RACK = 2  # equal rack labels
    FAR = 3


class TransferPair(NamedTuple):
    """Two workers, by their ids, between which a room's KV has moved."""

    prefill: str
    decode: str
    locality: Locality


class Kind(NamedTuple):
    """Transfers that are expected to be alike."""

    locality: Locality
    backend: str


@dataclass(slots=True)
class TransferMean:
    """Sums over transfers, the older ones counting less."""

    transfers: float = 0.0
    nbytes: float = 0.0
    seconds: float = 0.0

    @property
    def seconds_per_byte(self) -> float:
        """Of all bytes together. There must be some."""
        return self.seconds / self.nbytes

    def add(self, nbytes: int, seconds: float) -> None:
        """One more transfer."""
        self.age(1.0 - 1.0 / _WINDOW)
        self.transfers += 1.0
        self.nbytes += nbytes
        self.seconds += seconds

    def age(self, share: float) -> None:
        """Let what there is count only this much of what it did."""
        self.transfers *= share
        self.nbytes *= share
        self.seconds *= share


def machine(host: str) -> str:
    """The machine of a host identity (common/host.py): its boot id."""
    return host.partition("/")[0]


def locality(one: WorkerRecord, other: WorkerRecord) -> Locality:
    """How near two workers are to each other."""
    if one.host == other.host:
        return Locality.HOST
    if machine(one.host) == machine(other.host):
        return Locality.MACHINE
    return Locality.RACK if one.rack and one.rack == other.rack else Locality.FAR


def expected_backend(prefill: tuple[str, ...], decode: tuple[str, ...], near: Locality) -> str:
    """The backend that two workers will take (kvtransfer/select.py); "": they have none in common."""
    for backend in decode:
        if backend in prefill and (backend not in _OF_ONE_HOST or near is Locality.HOST):
            return backend
    return ""


def prior(weights: PolicyWeights, near: Locality) -> float:
    """The price of a token while no transfer has been seen."""
    shares = (weights.same_host, weights.same_machine, weights.same_rack, 1.0)
    return weights.transfer * shares[near]


def blended(prior_price: float, measured: float, transfers: float) -> float:
    """The geometric mean of two prices, the prior counting as PRIOR_TRANSFERS transfers. Free stays free."""
    share = transfers / (PRIOR_TRANSFERS + transfers)
    return float(prior_price ** (1.0 - share) * measured**share)


def scale(measured: Mapping[Kind, tuple[float, float]], weights: PolicyWeights) -> float:
    """How many times dearer than their priors all kinds are together. Kind -> (price, transfers)."""
    logs, total = 0.0, PRIOR_TRANSFERS
    for kind, (price, transfers) in measured.items():
        assumed = prior(weights, kind.locality)
        if assumed > 0 and price > 0:
            logs += transfers * math.log(price / assumed)
            total += transfers
    return math.exp(logs / total)


class TransferPrices:
    """The prices of one version of the rates."""

    def __init__(self, rates: TransferRates, weights: PolicyWeights, per_second: float) -> None:
        """`per_second`: the price of one byte that takes a second; 0: not known yet, so priors hold."""
        self._weights = weights
        self._measured: dict[Kind, tuple[float, float]] = {}
        self._of_offers: dict[tuple[Locality, tuple[str, ...], tuple[str, ...]], float] = {}
        self.pairs: dict[tuple[str, str], float] = {}  # (P id, D id) with a price of its own
        if per_second <= 0 or weights.transfer <= 0:
            self._scale = 1.0
            return
        for kind, mean in rates.kinds.items():
            self._measured[kind] = mean.seconds_per_byte * per_second, mean.transfers
        self._scale = scale(self._measured, weights)
        for pair, (kind, mean) in rates.pairs.items():
            if mean.transfers >= PRIOR_TRANSFERS:
                measured, usual = mean.seconds_per_byte * per_second, self.of(kind)
                if not usual / OWN_PRICE <= measured <= usual * OWN_PRICE:
                    self.pairs[pair] = blended(usual, measured, mean.transfers)

    def of(self, kind: Kind) -> float:
        """The price of one token over transfers of a kind."""
        assumed = prior(self._weights, kind.locality) * self._scale
        measured, transfers = self._measured.get(kind, (assumed, 0.0))
        return blended(assumed, measured, transfers)

    def at(self, near: Locality, prefill: tuple[str, ...], decode: tuple[str, ...]) -> float:
        """The price between two workers that are this near and offer these backends.

        No more than if they were farther from each other: two workers of a host can do what others can.
        """
        offers = near, prefill, decode
        price = self._of_offers.get(offers)
        if price is None:
            farther = [level for level in Locality if level >= near]
            price = min(self.of(Kind(level, expected_backend(prefill, decode, level))) for level in farther)
            self._of_offers[offers] = price
        return price

    def of_pair(self, prefill: WorkerRecord, decode: WorkerRecord) -> float:
        """The price between two workers."""
        own = self.pairs.get((prefill.id, decode.id))
        if own is not None:
            return own
        near = locality(prefill, decode)
        return self.at(near, prefill.transfer_backends, decode.transfer_backends)


class TransferRates:
    """The transfers that one router has heard of."""

    def __init__(self) -> None:
        self.version = 0  # grows when the prices may differ
        self.kinds: dict[Kind, TransferMean] = {}
        self.pairs: OrderedDict[tuple[str, str], tuple[Kind, TransferMean]] = OrderedDict()  # (P id, D id)
        self.prefill_tokens_per_s = 0.0  # mean of the prefill workers; 0: not known yet
        self.bytes_per_token = 0.0
        self._refreshed_at: float | None = None

    def fleet(self, records: list[WorkerRecord]) -> None:
        """The fleet's workers, at least one, with their latest loads."""
        speeds = [record.load.prefill_tokens_per_s for record in records if record.role is Role.PREFILL]
        known = [speed for speed in speeds if speed > 0]
        self.prefill_tokens_per_s = sum(known) / len(known) if known else 0.0
        self.bytes_per_token = sum(
            group.page_bytes / max(1, group.page_size)
            for group in records[0].groups
            if group.kind not in _BOUNDED
        )

    def observe(
        self, prefill: WorkerRecord, decode: WorkerRecord, backend: str, nbytes: int, seconds: float
    ) -> None:
        """A transfer is over."""
        if nbytes <= 0 or seconds <= 0:
            return
        kind, pair = Kind(locality(prefill, decode), backend), (prefill.id, decode.id)
        self.kinds.setdefault(kind, TransferMean()).add(nbytes, seconds)
        known = self.pairs.pop(pair, None)
        own = known[1] if known is not None and known[0] == kind else TransferMean()
        own.add(nbytes, seconds)
        self.pairs[pair] = kind, own
        if len(self.pairs) > _MOST_PAIRS:
            self.pairs.popitem(last=False)

    def tick(self, now: float) -> None:
        """Let old transfers count less, and publish what was observed. Cheap to call too often."""
        if self._refreshed_at is None:
            self._refreshed_at = now
        past = now - self._refreshed_at
        if past < _REFRESH_S:
            return
        self._refreshed_at = now
        if not self.kinds:
            return
        share = 0.5 ** (past / _HALF_LIFE_S)
        for mean in self.kinds.values():
            mean.age(share)
        for _, mean in self.pairs.values():
            mean.age(share)
        self.kinds = {kind: mean for kind, mean in self.kinds.items() if mean.transfers > _LEAST_TRANSFERS}
        for pair in [one for one, (_, mean) in self.pairs.items() if mean.transfers <= _LEAST_TRANSFERS]:
            del self.pairs[pair]
        self.version += 1

    def prices(self, weights: PolicyWeights) -> TransferPrices:
        """The prices now."""
        return TransferPrices(self, weights, self.bytes_per_token * self.prefill_tokens_per_s)
