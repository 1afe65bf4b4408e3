"""TransferTable: the price of moving one token's KV between any P and any D of a fleet.

A matrix of all pairs would have 250,000 prices for 500 + 500 workers. But to most P a D is equally far. So
the table has *layers*: one with all P at the price of the farthest, and one each for those that share D's
rack, machine and host. A P is in every layer that it is near enough for, so the cheapest price of a pair is
the one in the nearest layer: `TransferPrices.of` never rises towards nearer ones. Where workers offer
different backends, there are layers for each offer of a P. A P with a pair that has a price of its own is in
no layer: it has a row of prices, one for every D. The rows are few.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from router.placement.fleet_table import Floats, WorkerArrays
from router.placement.transfer_rates import Locality, TransferPrices, TransferRates, machine
from router.placement_options import PolicyWeights
from wire.records import WorkerRecord

Rows = npt.NDArray[np.intp]


@dataclass(frozen=True, slots=True)
class _Layer:
    """P at one distance from D, in groups: each D is that near to one group, or to none."""

    rows: Rows  # of P, group by group
    starts: Rows  # where in `rows` each group begins
    group: Rows  # by D row; the number of groups: none
    prices: Floats  # by D row
    least: Floats  # scratch: the least cost in each group, and infinity
    all_rows: bool  # there is one group, of all P, and every D is that near to it

    def cheapest(self, costs: Floats, missing: Floats) -> Floats:
        """By D row: the least cost of a P of its group and of the move; infinite without a group."""
        cheapest: Floats = self.prices * missing
        if self.all_rows:
            cheapest += costs[costs.argmin()]
            return cheapest
        np.minimum.reduceat(costs.take(self.rows), self.starts, out=self.least[:-1])
        cheapest += self.least.take(self.group)
        return cheapest

    def members(self, decode_row: int) -> Rows:
        """The P rows that a D is that near to."""
        group = self.group[decode_row]
        return np.split(self.rows, self.starts[1:])[group] if group < len(self.starts) else self.rows[:0]


@dataclass(frozen=True, slots=True)
class TransferTable:
    """Valid for these workers and this version of the rates."""

    prefill_names: list[str]
    decode_names: list[str]
    version: int
    layers: list[_Layer]  # the farthest first
    apart: Rows  # rows of the P that are in no layer
    apart_prices: Floats  # [of `apart`, D row]
    _columns: dict[int, Floats] = field(default_factory=dict)  # of D rows that were asked for

    def is_of(self, prefill: WorkerArrays, decode: WorkerArrays, rates: TransferRates) -> bool:
        """Whether this table is still right. Arrays of the same workers have the same list of names."""
        return (
            self.prefill_names is prefill.names
            and self.decode_names is decode.names
            and self.version == rates.version
        )

    @property
    def uniform(self) -> Floats | None:
        """The prices by D row, if to each D all P are equally far."""
        return self.layers[0].prices if len(self.layers) == 1 and not len(self.apart) else None

    def cheapest(self, costs: Floats, missing: Floats) -> Floats:
        """By D row: the least cost of a P and its move. `costs` are by P row, `missing` tokens by D row."""
        best: Floats | None = None
        for layer in self.layers:
            cheapest = layer.cheapest(costs, missing)
            best = cheapest if best is None else np.minimum(best, cheapest, out=best)
        if len(self.apart):
            rows = self.apart_prices * missing
            rows += costs.take(self.apart)[:, None]
            cheapest = np.minimum.reduce(rows, 0)
            best = cheapest if best is None else np.minimum(best, cheapest, out=best)
        assert best is not None, "there is a P"
        return best

    def prices_to(self, decode_row: int) -> Floats:
        """The prices from every P to one D, by P row."""
        column = self._columns.get(decode_row)
        if column is None:
            column = self._columns[decode_row] = np.empty(len(self.prefill_names))
            for layer in self.layers:
                column[layer.members(decode_row)] = layer.prices[decode_row]
            column[self.apart] = self.apart_prices[:, decode_row]
        return column


def transfer_table(
    prefill: WorkerArrays, decode: WorkerArrays, rates: TransferRates, weights: PolicyWeights
) -> TransferTable:
    """The table of a fleet. There is at least one P and one D."""
    prices = rates.prices(weights)
    ours, theirs = ([one.record for one in arrays.estimates] for arrays in (prefill, decode))
    with_own = {p for p, _ in prices.pairs}
    apart = [row for row, one in enumerate(ours) if one.id in with_own]
    by_offer: dict[tuple[str, ...], list[int]] = {}
    for row, one in enumerate(ours):
        if one.id not in with_own:
            by_offer.setdefault(one.transfer_backends, []).append(row)
    layers = [
        _layer(level, rows, ours, theirs, prices)
        for level in reversed(Locality)
        for rows in by_offer.values()
    ]
    rows = [[prices.of_pair(ours[row], one) for one in theirs] for row in apart]
    return TransferTable(
        prefill.names, decode.names, rates.version, [layer for layer in layers if layer is not None],
        np.array(apart, np.intp), np.array(rows).reshape(len(apart), len(theirs)),
    )  # fmt: skip


_NAME: dict[Locality, Callable[[WorkerRecord], str]] = {
    Locality.FAR: lambda _: "everywhere",
    Locality.RACK: lambda one: one.rack,
    Locality.MACHINE: lambda one: machine(one.host),
    Locality.HOST: lambda one: one.host,
}


def _layer(
    level: Locality,
    rows: list[int],
    ours: list[WorkerRecord],
    theirs: list[WorkerRecord],
    prices: TransferPrices,
) -> _Layer | None:
    """The layer of these rows of P, which offer the same backends. None when no D is that near to any."""
    name, offer = _NAME[level], ours[rows[0]].transfer_backends
    groups: dict[str, list[int]] = {}
    for row in rows:
        groups.setdefault(name(ours[row]), []).append(row)
    groups.pop("", None)
    numbers = {one: number for number, one in enumerate(groups)}
    group = np.array([numbers.get(name(one), len(groups)) for one in theirs], np.intp)
    if group.min() == len(groups):
        return None
    offers = {one.transfer_backends for one in theirs}
    price = {theirs: prices.at(level, offer, theirs) for theirs in offers}
    return _Layer(
        np.concatenate(list(groups.values())),
        np.cumsum([0, *map(len, groups.values())])[:-1],
        group,
        np.array([price[one.transfer_backends] for one in theirs]),
        np.full(len(groups) + 1, np.inf),
        level is Locality.FAR and len(rows) == len(ours),
    )
