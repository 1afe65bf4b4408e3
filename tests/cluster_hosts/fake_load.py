"""FakeLoad: the fake engine, slow without a core, and clients whose questions may change their size."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from engine.fake import fake_generate
from tests.chaos_ray.streams import Question
from tests.cluster_hosts.scene import configuration

CLIENTS = 12
GIVE_UP_S = 240.0
ROWS = 4  # of a decode worker
_STEP_S = 0.05
_CHUNK = 16  # a prefill worker computes so many tokens in a step


class Size(NamedTuple):
    """Of a question, in tokens."""

    prompt: int
    answer: int


BOTH = Size(prompt=300, answer=40)  # three prefill workers and two decode workers are busy with it
LITTLE = Size(prompt=16, answer=40)
DOCUMENTS = Size(prompt=300, answer=8)
PROBLEMS = Size(prompt=16, answer=120)


class FakeLoad:
    """What the clients ask. `size` may be changed while they do."""

    def __init__(self, size: Size) -> None:
        self.size = size

    def draw(self, rng: random.Random) -> Question:
        """Of the present size."""
        prompt = [rng.randrange(256) for _ in range(self.size.prompt)]
        return Question(prompt, fake_generate(prompt, self.size.answer))


def slow_configuration(routers: int, **sections: dict[str, Any]) -> dict[str, Any]:
    """The configuration with so many routers, the fake engine, and `sections` of its workers."""
    router = {"max_replicas_per_node": 1, "num_replicas": routers}
    router["options"] = {"max_queue_s": GIVE_UP_S, "prefill_on_decode_tokens": 0}
    fewer = {name: {"max_replicas_per_node": 2, **section} for name, section in sections.items()}
    config: dict[str, Any] = configuration("auto", router=router, **fewer)
    (application,) = config["applications"]
    del application["deployments"]
    rows = {"chunked_prefill_size": _CHUNK, "max_prefill_tokens": _CHUNK, "max_running_requests": ROWS}
    application["args"]["worker"].update(engine="fake", fake_step_s=_STEP_S, max_total_tokens=8192, **rows)
    return config
