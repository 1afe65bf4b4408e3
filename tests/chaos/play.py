"""Play: carries out a fault on a running stack, and puts everything right again afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterable
from random import Random
from signal import SIGCONT, SIGKILL, SIGSTOP, SIGTERM

from tests.chaos.client import Client
from tests.chaos.observed import wait_until
from tests.chaos.processes import Forked
from tests.chaos.stack import ChaosStack, until

STOPPED_S = 2.5  # longer than it takes to notice
_SLOW_S = 0.15
_ENDS_S = 15.0


class Play:
    """One fault: `begin`, `go_on` once the gates are open, `end` when the streams are over."""

    def __init__(self, fault: str, stack: ChaosStack, victim: Forked, rng: Random) -> None:
        self.fault = fault
        self.began_unix = 0.0
        self.began = 0.0  # of the monotonic clock
        self._stack = stack
        self._victim = victim
        self._slot = stack.slot_of(victim)
        self._rng = rng
        self.faulted = self._faulted()  # worker ids that may be suspected

    def _faulted(self) -> frozenset[str]:
        role = self._slot.partition("/")[0]
        worker = str(self._victim.ready.get("id", ""))
        if self.fault in ("partition P-D", "abort"):
            return frozenset()  # no router loses a worker
        return frozenset({worker}) if role in ("P", "D") else frozenset()

    def begin(self, clients: list[Client]) -> None:
        """The fault happens now."""
        faults, name = self._stack.network.faults, self._victim.name
        self.began_unix, self.began = time.time(), time.monotonic()
        match self.fault:
            case "kill":
                self._victim.kill()
            case "stop" | "thaw":
                self._victim.send_signal(SIGSTOP)
            case "partition router-worker":
                faults.cut(name, self._stack.of_role("router")[0].name)  # the one that clients prefer
            case "partition P-D":
                for peer in self._peers():
                    faults.cut(name, peer.name)
            case "lossy":
                faults.lose(name)
            case "slow":
                faults.slow(name, _SLOW_S)
            case "abort":
                for client in clients[::2]:
                    client.leave.set()

    def go_on(self) -> None:
        """What a supervisor, or the network, does about the fault while the streams run."""
        stack, victim = self._stack, self._victim
        same_id = self._rng.random() < 0.5
        match self.fault:
            case "kill":
                del stack.running[self._slot]
                stack.start(self._slot, same_id).wait_ready()
            case "stop":
                time.sleep(STOPPED_S)
                victim.send_signal(SIGCONT)
            case "thaw":
                del stack.running[self._slot]
                stack.strays.append(victim)
                stack.start(self._slot, same_id).wait_ready()
                time.sleep(max(0.0, self.began + STOPPED_S - time.monotonic()))
                victim.send_signal(SIGCONT)
            case "partition router-worker" | "partition P-D":
                time.sleep(STOPPED_S)
                stack.network.faults.heal()

    def end(self) -> str | None:
        """Heal, end what was replaced, start what is missing. What was wrong with it, if anything was."""
        stack, problem = self._stack, None
        stack.network.faults.heal()
        for stray in stack.strays:
            same_id = stray.ready.get("id") in {worker.ready.get("id") for worker in stack.workers}
            if same_id and not wait_until(lambda stray=stray: not stray.alive, _ENDS_S):  # type: ignore[misc]
                problem = f"{stray.name} was replaced under its id and does not end"
            stray.end(SIGKILL if same_id else SIGTERM)
        stack.strays.clear()
        for slot, forked in list(stack.running.items()):
            if not forked.alive or forked.observed.draining:
                if forked.alive:
                    forked.end(SIGTERM)
                del stack.running[slot]
                stack.start(slot).wait_ready()
        until(stack.whole, "the routers do not see the workers that run")
        return problem

    def _peers(self) -> Iterable[Forked]:
        """The workers of the other role."""
        return self._stack.of_role("D" if self._slot.startswith("P/") else "P")[:1]
