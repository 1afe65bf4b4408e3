"""What tiers serve, by the size of the host and by policy: `python -m bench.tier_curves --json [--png FILE]`.

One worker in this process with a tiny model. Its scheduler, memory, mover and file backend are the real ones.

    sizes       bench.tier_trace's prompts, one after another, for each write policy and hicache_ratio, with
                and without storage. The tiers come to rest after every step, so these counts are repeatable
    prefetch    documents that storage alone has, of which four come at once every `every_s` seconds, for each
                prefetch policy and duration of a page's read (bench.slow_store), with
                hicache_storage_prefetch_if_slower, and for the default, which is "timeout, if faster" than
                computing. Times differ from run to run

`ratios`: found_rRATIO: share of the prompts' tokens that need no computing with that hicache_ratio,
write_through and no storage / with the device alone. `values`:

    trace             turns, prompt_tokens, device_tokens; device: share found with the device alone; again:
                      the same on a device that has room for all
    sizes             by write policy and ratio: device, host, storage: shares of the prompt tokens;
                      to_host, to_device, to_storage, from_storage: pages moved for each page of the prompts;
                      down_bytes, up_bytes: between device and host; host_alone: share found without storage
    prefetch          by policy and ms of a page's read: computed: share of the prompt tokens; queue_s and
                      ttft_s: means; page_compute_ms: of a page, without tiers; every_s
"""

from __future__ import annotations

import importlib.util
import random
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean, median
from typing import Any

from bench.common import argument_parser, print_result
from bench.slow_store import SlowStore
from bench.tier_rig import DEVICE_TOKENS, PAGE_SIZE, Moved, Sources, TierRig, Waited, made_model
from bench.tier_trace import Turn, draw_tokens, draw_trace
from common.errors import ConfigError
from engine.config import EngineConfig
from engine.loader import LoadedModel
from kvcache.storage.config import StorageConfig
from kvcache.tiers.config import PREFETCH_POLICIES, WRITE_POLICIES, TierConfig

RATIOS = (0.5, 1.0, 2.0, 4.0, 8.0)
READ_MS = (0.5, 2.0, 8.0, 32.0)
PREFETCHES: dict[str, dict[str, Any]] = {
    **{policy: {"prefetch_policy": policy, "prefetch_if_slower": True} for policy in PREFETCH_POLICIES},
    "timeout, if faster": {},
}
_TINY, _SMALL = (128, 2), (512, 6)  # width and layers: of the counts, and of the times
_DOCUMENTS, _BURST = 8, 4
_LONG_TOKENS = 1536
_LOAD = 0.8  # of the worker, if it computed all of the documents
_DIGEST = b"bench.tier_curves".ljust(32, b"-")


@dataclass(frozen=True)
class Bench:
    """What every run shares."""

    loaded: LoadedModel
    engine: EngineConfig
    scratch: Path

    def rig(self, tiers: TierConfig, device_tokens: int = DEVICE_TOKENS) -> TierRig:
        """A worker whose memory is empty."""
        return TierRig(self.loaded, self.engine, tiers, device_tokens)

    def with_files(self, tiers: TierConfig, name: str, **changes: Any) -> TierConfig:
        """The same with storage in the folder `name`."""
        storage = StorageConfig(path=self.scratch / name, **changes)
        return replace(tiers, storage=storage, model_digest=_DIGEST)


# -- sizes -------------------------------------------------------------------------------------------


def serve(rig: TierRig, turns: list[Turn]) -> tuple[Sources, Moved]:
    """Answer all turns, and say what all their prompts came from."""
    texts: dict[int, list[int]] = {}
    found = []
    with rig:
        for turn in turns:
            text = texts.setdefault(turn.session, [])
            text += turn.adds
            sources, said = rig.ask(text)
            text += said
            found.append(sources)
        return Sources(*map(sum, zip(*found, strict=True))), rig.moved()


def _size(bench: Bench, turns: list[Turn], policy: str, ratio: float) -> dict[str, Any]:
    """One point of the curves: with storage, and without."""
    tiers = TierConfig(
        ratio=ratio,
        write_policy=policy,
        prefetch_policy="wait_complete",
        prefetch_threshold=4 * PAGE_SIZE,  # the prompts are short
        prefetch_if_slower=True,  # no clock decides
    )
    alone, _ = serve(bench.rig(tiers), turns)
    sources, moved = serve(bench.rig(bench.with_files(tiers, f"{policy}-{ratio}")), turns)
    pages = sources.prompt / PAGE_SIZE
    return {
        **{tier: round(getattr(sources, tier) / sources.prompt, 4) for tier in ("device", "host", "storage")},
        "to_host": round(moved.to_host / pages, 4),
        "to_device": round(moved.to_device / pages, 4),
        "to_storage": round(moved.to_storage / pages, 4),
        "from_storage": round(moved.from_storage / pages, 4),
        "down_bytes": moved.to_host_bytes,
        "up_bytes": moved.to_device_bytes,
        "host_alone": round(1 - alone.computed / alone.prompt, 4),
    }


# -- prefetch ----------------------------------------------------------------------------------------


def _documents() -> list[list[int]]:
    chance = random.Random(2)
    return [draw_tokens(chance, _LONG_TOKENS) for _ in range(_DOCUMENTS + 1)]


def _prefetch(bench: Bench, every_s: float) -> Iterator[tuple[str, float, list[Waited]]]:
    """A name of PREFETCHES, milliseconds of a page's read, and what became of the requests."""
    documents, device_tokens = _documents(), 2 * _DOCUMENTS * _LONG_TOKENS
    tiers = TierConfig(ratio=1.0)
    with bench.rig(bench.with_files(tiers, "documents"), device_tokens) as rig:
        for document in documents:
            rig.ask(document)
    prompts = [[*document, 7] for document in documents]
    bursts = [prompts[first : first + _BURST] for first in range(0, len(prompts) - 1, _BURST)]
    warm = [[[8, *prompts[0]]], [prompts[-1]]]  # how long computing and reading take is known then
    for read_ms in READ_MS:
        slow = {"backend": f"{SlowStore.__module__}:{SlowStore.__name__}", "extra": {"read_s": read_ms / 1e3}}
        for name, options in PREFETCHES.items():
            chosen = bench.with_files(replace(tiers, **options), "documents", **slow)
            with bench.rig(chosen, device_tokens) as rig:
                for burst in warm:
                    rig.ask_all([burst])
                yield name, read_ms, rig.ask_all(bursts, every_s)


def _page_compute_s(bench: Bench) -> float:
    """Seconds that a page of such a document takes to compute, its share of all else included."""
    with bench.rig(TierConfig(), 2 * _DOCUMENTS * _LONG_TOKENS) as rig:
        waited = [rig.ask_all([[document]])[0] for document in _documents()]
    return median(one.ttft_s for one in waited) * PAGE_SIZE / _LONG_TOKENS


# -- all ---------------------------------------------------------------------------------------------


def _measure(tiny: Bench, small: Bench, seed: int) -> tuple[dict[str, float], dict[str, Any]]:
    """`ratios` and `values`."""
    turns = draw_trace(seed)
    device, _ = serve(tiny.rig(TierConfig()), turns)
    again, _ = serve(tiny.rig(TierConfig(), device_tokens=2 * device.prompt), turns)
    sizes = {
        policy: {f"{ratio:g}": _size(tiny, turns, policy, ratio) for ratio in RATIOS}
        for policy in WRITE_POLICIES
    }
    page_s = _page_compute_s(small)
    every_s = _BURST * page_s * _LONG_TOKENS / PAGE_SIZE / _LOAD
    prefetch: dict[str, dict[str, Any]] = {name: {} for name in PREFETCHES}
    for name, read_ms, waited in _prefetch(small, every_s):
        prefetch[name][f"{read_ms:g}"] = {
            "computed": round(sum(one.computed for one in waited) / sum(one.prompt for one in waited), 4),
            "queue_s": round(mean(one.queue_s for one in waited), 4),
            "ttft_s": round(mean(one.ttft_s for one in waited), 4),
        }
    alone = device.device / device.prompt
    values = {
        "trace": {
            "turns": len(turns),
            "prompt_tokens": device.prompt,
            "device_tokens": DEVICE_TOKENS,
            "device": round(alone, 4),
            "again": round(again.device / again.prompt, 4),
        },
        "sizes": sizes,
        "prefetch": {"page_compute_ms": round(page_s * 1e3, 3), "every_s": round(every_s, 3), **prefetch},
    }
    through = sizes["write_through"]
    return {f"found_r{ratio}": round(one["host_alone"] / alone, 3) for ratio, one in through.items()}, values


def main() -> None:
    """Measure, print, draw."""
    parser = argument_parser(__doc__)
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw the curves (needs matplotlib)")
    parser.add_argument("--seed", type=int, default=1, help="of the prompts; default: %(default)s")
    given = parser.parse_args()
    if given.png is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--png", "matplotlib is not installed", "pip install 'baton-serve[plot]'")
    with tempfile.TemporaryDirectory(prefix="bt-", dir="/tmp") as folder:
        scratch = Path(folder)
        tiny, small = (
            Bench(*made_model(scratch / f"model-{layers}", hidden, layers), scratch)
            for hidden, layers in (_TINY, _SMALL)
        )
        ratios, values = _measure(tiny, small, given.seed)
    if given.png is not None:
        from bench.tier_plot import draw  # imports matplotlib, which is optional

        draw(values, given.png)
    print_result("tier_curves", ratios, values, given.json)


if __name__ == "__main__":
    main()
