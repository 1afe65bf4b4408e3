"""PeerFetch: which worker could give a candidate the pages that it lacks, and whether that pays.

A *holder* is a worker that takes new work and, by the index, holds a longer prefix of the prompt than the
candidate, on the device or in host memory. What is only expected there, or lies in its storage, is no source.
Holders are workers of both roles. A worker says in its record whether it fetches and lends, or does neither.
For a candidate w and a holder x, in the unit of kv_policy.py, where a token that w computes itself costs
`each`:

    gain(x, w)  = tokens of the pages that x holds and w does not; those on their way to w are not missing
    fetch(x, w) = fetch_start + price(x, w) (1 + fetch_share running(x)) gain(x, w)
    saved(x, w) = each gain(x, w) - fetch(x, w)

`price` is that of a transfer between the two (transfer_rates.py): measured, or the prior. `running` is the
number of fetches from x that this router has named and whose rooms have no first token yet. The holder that
saves most is named, if it saves anything; of equals a decode worker, which keeps longer what it has lent
(kvcache/second_chances.py). The last token of a prompt is always computed, and with it its page. The
MOST_HOLDERS that hold most are compared, for all candidates at once.
"""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from router.index.global_index import Matches
from router.placement.fleet_table import Floats, Integers, WorkerArrays
from router.placement.load_estimate import WorkerLoadEstimate
from router.placement.transfer_rates import Locality, TransferRates, machine
from router.placement_options import PolicyWeights

MOST_HOLDERS = 16


class FetchPlan(NamedTuple):
    """What the worker that computes a prompt should fetch."""

    holder: WorkerLoadEstimate
    pages: int  # leading pages of the prompt that the holder has
    tokens: int  # of them, those that the worker lacks


class Offers(NamedTuple):
    """What could be fetched for one prompt. Arrays have one entry per worker, P first."""

    saved: Floats  # by the best fetch, in the policy's unit; 0: none pays
    tokens: Floats  # of that fetch
    source: Integers  # its holder, as an index into the next two
    holders: Integers  # the rows of those that were compared
    pages: Integers  # what they hold
    estimates: list[WorkerLoadEstimate]  # by row

    def fetch(self, row: int) -> FetchPlan | None:
        """The best fetch for a worker."""
        if self.saved[row] <= 0:
            return None
        source = self.source.item(row)
        holder = self.estimates[self.holders.item(source)]
        return FetchPlan(holder, self.pages.item(source), int(self.tokens[row]))


class PeerFetch:
    """Names holders. One per policy; belongs to one thread."""

    def __init__(self, weights: PolicyWeights) -> None:
        self._weights = weights
        self._running: Counter[str] = Counter()
        self._fleet: _FetchPrices | None = None

    def began(self, fetch: FetchPlan) -> None:
        """A room that fetches was placed."""
        self._running[fetch.holder.record.id] += 1

    def ended(self, holder: str) -> None:
        """The first token of such a room came, or will not come."""
        self._running[holder] -= 1
        if self._running[holder] <= 0:
            del self._running[holder]

    def offers(
        self,
        prompt_tokens: int,
        page_tokens: int,
        matches: Matches,
        prefill: WorkerArrays,
        decode: WorkerArrays,
        rates: TransferRates,
    ) -> Offers | None:
        """What could be fetched, for every worker. None: nobody holds more than another."""
        fleet = self._fleet
        if fleet is None or not fleet.is_of(prefill, decode, rates):
            fleet = self._fleet = _FetchPrices(prefill, decode, rates, self._weights)
        if page_tokens < 1:
            return None
        usable = (prompt_tokens - 1) // page_tokens
        real = matches.found[0] - matches.storage
        real -= matches.expected
        held = np.minimum(real.take(fleet.slots), usable)
        held *= fleet.able
        has = np.minimum(matches.pages.take(fleet.slots), usable)
        rows = (held > has[has.argmin()]).nonzero()[0]
        if len(rows) == 0:
            return None
        running = self._running_of(fleet.names, rows)
        if len(rows) > MOST_HOLDERS:
            best = np.sort(np.lexsort((running, -held.take(rows)))[:MOST_HOLDERS])
            rows, running = rows.take(best), running.take(best)
        pages = held.take(rows)
        gain = np.maximum(pages[:, None] - has, 0) * (fleet.able * np.float64(page_tokens))
        price = fleet.prices(rows)
        price *= (1.0 + self._weights.fetch_share * running)[:, None]
        saved: Floats = fleet.each - price
        saved *= gain
        source = len(rows) - 1 - saved[::-1].argmax(0)  # of equals the last: decode workers
        columns = fleet.columns
        saved = saved[source, columns] - self._weights.fetch_start
        np.maximum(saved, 0.0, out=saved)
        return Offers(saved, gain[source, columns], source, rows, pages, fleet.estimates)

    def _running_of(self, names: list[str], rows: Integers) -> Floats:
        if not self._running:
            return np.zeros(len(rows))
        return np.array([self._running.get(names[row], 0) for row in rows.tolist()], np.float64)


class _FetchPrices:
    """What is known of these workers, and of this version of the rates. A holder's prices are computed when
    they are asked for the first time."""

    def __init__(
        self, prefill: WorkerArrays, decode: WorkerArrays, rates: TransferRates, weights: PolicyWeights
    ) -> None:
        self._prefill_names, self._decode_names, self._version = prefill.names, decode.names, rates.version
        self.names = prefill.names + decode.names
        self.estimates = prefill.estimates + decode.estimates
        self.slots = np.concatenate([prefill.slots, decode.slots])
        self.columns = np.arange(len(self.names))
        self.each = np.repeat([weights.prefill_left, weights.decode_prefill], [len(prefill), len(decode)])
        self.able = np.array([one.record.peer_fetch for one in self.estimates], np.int64)
        self._prices = rates.prices(weights)
        self._known: dict[int, Floats] = {}
        records = [one.record for one in self.estimates]
        self._hosts = _codes([one.host for one in records])
        self._machines = _codes([machine(one.host) for one in records])
        self._racks = _codes([one.rack for one in records])
        self._labelled = np.array([bool(one.rack) for one in records])
        self._offers = sorted({one.transfer_backends for one in records})
        self._offer = np.array([self._offers.index(one.transfer_backends) for one in records], np.intp)

    def is_of(self, prefill: WorkerArrays, decode: WorkerArrays, rates: TransferRates) -> bool:
        """Whether this is still right. Arrays of the same workers have the same list of names."""
        return (
            self._prefill_names is prefill.names
            and self._decode_names is decode.names
            and self._version == rates.version
        )

    def prices(self, rows: Integers) -> Floats:
        """Of a token from each of these holders to every worker. The caller may write to it."""
        return np.stack([self._of(row) for row in rows.tolist()])

    def _of(self, row: int) -> Floats:
        known = self._known.get(row)
        if known is None:
            known = self._known[row] = self._computed(row)
        return known

    def _computed(self, row: int) -> Floats:
        near = np.full(len(self.names), int(Locality.FAR))
        near[(self._racks == self._racks[row]) & self._labelled] = Locality.RACK
        near[self._machines == self._machines[row]] = Locality.MACHINE
        near[self._hosts == self._hosts[row]] = Locality.HOST
        ours = self._offers[self._offer[row]]
        table = np.array(
            [[self._prices.at(level, ours, theirs) for level in Locality] for theirs in self._offers]
        )
        prices: Floats = table[self._offer, near]
        for (holder, to), price in self._prices.pairs.items():
            if holder == self.names[row] and to in self.names:
                prices[self.names.index(to)] = price
        return prices


def _codes(names: list[str]) -> npt.NDArray[np.intp]:
    """Equal names get equal numbers."""
    return np.unique(names, return_inverse=True)[1]
