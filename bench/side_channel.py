"""Can a client tell whether another tenant has asked a text that it guesses? Real HTTP on a real stack.

    python -m bench.side_channel --json [--probes 1000] [--min-tenants 3]

2P + 1D; tenants share pages that K to 2K - 1 of them have computed (K: `--min-tenants`), and an epoch lasts a
quarter of a second. All texts begin with pages that are public already. For each probe a victim asks a fresh
text: the one that is guessed (world A) or another one of the same length (world B), drawn at random. Then
K - 1 accounts of one attacker ask the guess, an epoch and more apart, in three `stages`:

    alone      the first account asks; nobody but, perhaps, the victim has asked before
    colluding  the last of the K - 1 asks, after all others
    again      the first account asks again, after the epoch in which K askings, the victim's among them, may
               have made the pages public

Each is an answer's stream seen from outside: times of its events, usage, all headers, and /metrics of the
public listener, if it is there. Nothing that a client receives names a worker. In between come probes as a
control, whose victim and attacker are one tenant, as where all share. `ratios`:

    auc_on       the largest of the stages' `upper`: what 95% of resamplings of the probes stay below of the
                 area under a classifier's ROC curve (logistic regression over all features, trained on one
                 half of the probes and tested on the other; the mean of both ways of ten divisions)
    auc_control  this area for the control, by the time to the first token alone; below 0.95 the run shows
                 nothing

`values`:

    min_p        the smallest p of permutation tests of all features of all stages, by Holm's correction
    miss_ms      by how much a miss of the control takes longer than a hit: prompts are sized for 65
    stages       by stage: `auc`, `upper`, and the smallest corrected p with its feature
"""

from __future__ import annotations

import json
import math
import random
import secrets
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config

from bench.common import argument_parser, print_result
from bench.make_model import VOCAB_SIZE, make_model
from bench.probe_client import ProbeClient
from bench.world_statistics import Observed, Worlds, auc, classify, holm, permutation_ps
from tests.harness.local_stack import Stack, stack

PAGE_SIZE = 16
COMMON_TOKENS = 4 * PAGE_SIZE  # public: all texts begin with them
OUTPUT_TOKENS = 4
BATCH = 40  # texts; a stage is done for all of them before the next one begins
CONTROLS = 0.1  # of the probes, and at least _FEWEST_CONTROLS of each world
EPOCH_S = 0.25
MISS_S = 0.065
PERMUTATIONS = 20_000
RESAMPLINGS = 1000
EVERYBODY = "everybody"
_FEWEST_CONTROLS = 20
_LONGEST = 1024
_BOUND_S = 60.0
_SIZING_TOKENS = 256
_LEAST_COST_S = 0.001


@dataclass
class Probe:
    """One fresh text. `is_guess`: world A, in which the victim asks the text itself."""

    text: list[int]
    victims: list[int]
    is_guess: bool
    is_control: bool
    seen: dict[str, Observed] = field(default_factory=dict)  # by stage
    asked_at: float = 0.0  # last, by the monotonic clock


class Attack:
    """The accounts of all tenants at one stack, and what they ask."""

    def __init__(self, running: Stack, keys: dict[str, str], min_tenants: int, draw: random.Random) -> None:
        """`keys` of the API by tenant."""
        self._running = running
        self._keys = keys
        self._accounts = [f"attacker {number}" for number in range(min_tenants - 1)]
        self._draw = draw
        self._common = self._tokens(COMMON_TOKENS)
        self._clients = ExitStack()
        self._victims = [(self._client("victim"), self._client(EVERYBODY)) for _ in running.prefill]
        self._attackers = {name: self._client(name) for name in (*self._accounts, EVERYBODY)}

    def close(self) -> None:
        """Close all connections."""
        self._clients.close()

    def _client(self, tenant: str) -> ProbeClient:
        made = ProbeClient(self._running.url, self._keys[tenant], OUTPUT_TOKENS)
        return self._clients.enter_context(made)

    def _tokens(self, count: int) -> list[int]:
        return [self._draw.randrange(300, VOCAB_SIZE) for _ in range(count)]

    # -- before the probes -------------------------------------------------------------------------

    def publish_beginning(self, others: Sequence[str]) -> None:
        """Make the common pages public on a prefill worker; the others follow when they get requests."""
        deadline = time.monotonic() + _BOUND_S
        with ThreadPoolExecutor(4) as pool:
            while not any(self._has_public(worker) for worker in self._running.prefill):
                if time.monotonic() > deadline:
                    raise RuntimeError("the common beginning does not become public")
                list(pool.map(self._warm, others))
                time.sleep(2 * EPOCH_S)

    def _has_public(self, worker: Any) -> bool:
        told = self._running.inspect(worker, "sharing")
        return bool(told["public_pages"] >= COMMON_TOKENS // PAGE_SIZE)

    def _warm(self, tenant: str) -> None:
        with ProbeClient(self._running.url, self._keys[tenant], OUTPUT_TOKENS) as client:
            client.ask(self._common + self._tokens(2 * PAGE_SIZE))  # more than D computes alone

    def sized(self) -> int:
        """Tokens of a text that take MISS_S longer to compute than to find."""
        client, costs = self._attackers[EVERYBODY], []
        for _ in range(7):
            text = self._common + self._tokens(_SIZING_TOKENS)
            miss, hit = (client.ask(text).numbers["ttft_ms"] / 1e3 for _ in range(2))
            costs.append(max(miss - hit, _LEAST_COST_S) / _SIZING_TOKENS)
        pages = math.ceil(MISS_S / min(costs) / PAGE_SIZE)  # other work makes the rest slower
        return COMMON_TOKENS + min(max(4, pages) * PAGE_SIZE, _LONGEST - COMMON_TOKENS)

    # -- probes ------------------------------------------------------------------------------------

    def drawn(self, worlds: Sequence[bool], controls: Sequence[bool], tokens: int) -> list[Probe]:
        """Fresh texts of so many tokens for these worlds and these of the control, in random order."""

        def probe(is_guess: bool, is_control: bool) -> Probe:
            text, other = (self._common + self._tokens(tokens - COMMON_TOKENS) for _ in range(2))
            return Probe(text, text if is_guess else other, is_guess, is_control)

        made = [probe(one, False) for one in worlds] + [probe(one, True) for one in controls]
        self._draw.shuffle(made)
        return made

    def run(self, probes: Sequence[Probe]) -> None:
        """The victims ask, then the attacker's accounts do, then the first one again."""
        with ThreadPoolExecutor(len(self._victims)) as pool:
            parts = [probes[at :: len(self._victims)] for at in range(len(self._victims))]
            list(pool.map(self._as_victim, self._victims, parts))
        asked = [probe for probe in probes if not probe.is_control]
        first, *others = self._accounts
        self._stage(probes, first, "alone")
        for account in others:
            self._stage(asked, account, "colluding")
        self._stage(asked, first, "again")

    def _as_victim(self, clients: tuple[ProbeClient, ProbeClient], probes: Sequence[Probe]) -> None:
        victim, everybody = clients
        for probe in probes:
            (everybody if probe.is_control else victim).ask(probe.victims)
            probe.asked_at = time.monotonic()

    def _stage(self, probes: Sequence[Probe], account: str, stage: str) -> None:
        """Each text when at least an epoch has ended since it was asked last. Workers end epochs when they
        sweep, so that it takes longer than an epoch."""
        for probe in probes:
            client = self._attackers[EVERYBODY if probe.is_control else account]
            time.sleep(max(0.0, probe.asked_at + 3 * EPOCH_S - time.monotonic()))
            probe.seen[stage] = client.probe(probe.text)
            probe.asked_at = time.monotonic()


def make_probe_model(directory: Path) -> None:
    """A model of which a few hundred tokens take 60 ms on one thread."""
    make_model(
        directory,
        Qwen3Config(
            vocab_size=VOCAB_SIZE,
            hidden_size=512,
            intermediate_size=1536,
            num_hidden_layers=8,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=2 * _LONGEST,
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=258,
            pad_token_id=256,
            dtype=torch.bfloat16,
        ),
    )


def attack(probes: int, min_tenants: int, seed: int) -> list[Probe]:
    """Run `probes` of each world, and those of the control."""
    draw = random.Random(seed)
    tenants = ["victim", EVERYBODY, *(f"attacker {number}" for number in range(min_tenants - 1))]
    others = [f"other {number}" for number in range(4 * min_tenants)]
    keys = {tenant: secrets.token_hex(16) for tenant in (*tenants, *others)}
    with ExitStack() as cleanup:
        scratch = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="sc-", dir="/tmp")))
        make_probe_model(scratch / "model")
        file = scratch / "keys"
        file.touch(mode=0o600)
        file.write_text(json.dumps([{"key": key, "tenant": tenant} for tenant, key in keys.items()]))
        running = cleanup.enter_context(
            stack(
                scratch / "model",
                scratch / "run",
                2,
                1,
                router={"api_keys_file": str(file), "policy": "kv"},
                threads=1,
                page_size=PAGE_SIZE,
                max_total_tokens=2 * BATCH * (min_tenants + 1) * 256,
                max_running_requests=8,
                sharing_min_tenants=min_tenants,
                sharing_epoch_s=EPOCH_S,
            )
        )
        accounts = Attack(running, keys, min_tenants, draw)
        cleanup.callback(accounts.close)
        accounts.publish_beginning(others)
        return _all_probes(accounts, probes, draw)


def _all_probes(accounts: Attack, probes: int, draw: random.Random) -> list[Probe]:
    tokens = accounts.sized()
    worlds = [number % 2 == 0 for number in range(2 * probes)]
    controls = [number % 2 == 0 for number in range(2 * max(_FEWEST_CONTROLS, int(CONTROLS * probes)))]
    draw.shuffle(worlds)
    draw.shuffle(controls)
    done, batches = list[Probe](), math.ceil(2 * probes / BATCH)
    for number in range(batches):
        made = accounts.drawn(worlds[number::batches], controls[number::batches], tokens)
        accounts.run(made)
        done += made
    return done


def judged(probes: Sequence[Probe], seed: int) -> tuple[dict[str, float], dict[str, Any]]:
    """The `ratios` and `values` of what was seen."""
    draw = np.random.default_rng(seed)
    asked = [probe for probe in probes if not probe.is_control]
    worlds = _worlds(asked)
    ps: dict[tuple[str, str], float] = {}
    stages: dict[str, dict[str, Any]] = {}
    for stage in asked[0].seen:
        seen = [probe.seen[stage] for probe in asked]
        guessed = classify(seen, worlds, RESAMPLINGS, draw)
        stages[stage] = {"auc": round(guessed.auc, 3), "upper": round(guessed.upper, 3)}
        ps |= {(stage, name): p for name, p in permutation_ps(seen, worlds, PERMUTATIONS, draw).items()}
    corrected = holm({f"{stage}: {name}": p for (stage, name), p in ps.items()})
    for stage, told in stages.items():
        name = min((name for of, name in ps if of == stage), key=lambda name: ps[stage, name])
        told["least_p"], told["of"] = round(corrected[f"{stage}: {name}"], 4), name
        told["features"] = sum(of == stage for of, _ in ps)
    area, hit_ms, miss_ms = _control([probe for probe in probes if probe.is_control])
    ratios = {
        "auc_on": max(told["upper"] for told in stages.values()),
        "auc_control": round(area, 4),
    }
    values = {
        "min_p": round(min(corrected.values()), 4),
        "miss_ms": round(miss_ms - hit_ms, 1),
        "hit_ttft_ms": round(hit_ms, 1),
        "probes": len(asked),
        "controls": len(probes) - len(asked),
        "prompt_tokens": len(asked[0].text),
        "stages": stages,
    }
    return ratios, values


def _worlds(probes: Sequence[Probe]) -> Worlds:
    return np.array([probe.is_guess for probe in probes])


def _control(probes: Sequence[Probe]) -> tuple[float, float, float]:
    """How well the time to the first token tells the worlds apart, and its medians in both."""
    worlds = _worlds(probes)
    times = np.array([probe.seen["alone"].numbers["ttft_ms"] for probe in probes])
    return auc(-times, worlds), float(np.median(times[worlds])), float(np.median(times[~worlds]))


def main() -> None:
    """Measure, print."""
    parser = argument_parser(__doc__)
    parser.add_argument("--probes", type=int, default=1000, help="of each world")
    parser.add_argument("--min-tenants", type=int, default=3, help="K, at least 2")
    parser.add_argument("--seed", type=int, default=19)
    given = parser.parse_args()
    started = time.monotonic()
    probes = attack(given.probes, given.min_tenants, given.seed)
    ratios, values = judged(probes, given.seed)
    values["wall_s"] = round(time.monotonic() - started)
    print_result("side_channel", ratios, values, given.json)


if __name__ == "__main__":
    main()
