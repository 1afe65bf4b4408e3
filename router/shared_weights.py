"""SharedWeights: the weights of a router's models, which are the same in all routers of a directory.

Three say them: the configuration, an operator at an admin listener, and other routers through the directory.
What was said last holds (wire/settings.py).
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping

from common.errors import Unavailable
from router.placement.models import Models
from wire.settings import NO_SETTINGS, ModelWeights, Settings

log = logging.getLogger(__name__)

_Weights = Mapping[str, float]  # of version names


class SharedWeights:
    """Belongs to one event loop."""

    def __init__(self, models: Models, configured: Mapping[str, _Weights]) -> None:
        """`configured` are by model, {} where the options have none. The `models` begin with these."""
        self.settings = NO_SETTINGS  # all that this router knows, to be told to the directory
        self._models = models.by_name
        self._configured = {name: dict(weights) for name, weights in configured.items() if weights}
        self._directory: Settings | None = None  # what the last View said; None: there was none
        self._view = asyncio.Event()  # of the next View

    def configure(self, configured: Mapping[str, _Weights]) -> None:
        """A configuration was deployed, or this router starts with it. Before the first View nobody knows
        whether it is a new one."""
        self._configured |= {name: dict(weights) for name, weights in configured.items()}
        if self._directory is not None:
            self._say_configured()
            return
        for name, weights in self._configured.items():
            self._models[name].weigh(weights)

    def take(self, told: Settings) -> None:
        """Take what a View says."""
        self._directory = told
        self._learn(told)
        self._say_configured()
        self._view.set()
        self._view = asyncio.Event()

    def current(self, model: str) -> ModelWeights:
        """What holds for a model. Revision 0: nobody has said anything."""
        configured = self._configured.get(model, {})
        return self.settings.weights.get(model) or ModelWeights(0, configured, configured)

    async def say(self, model: str, weights: _Weights, timeout_s: float) -> None:
        """An operator's word. Returns when the directory knows it, or a later one: it tells all routers.

        Raises Unavailable after `timeout_s`. It holds here all the same, and is told as soon as it can be.
        """
        if self._directory is None:
            raise Unavailable("this router has not heard of the directory yet: try again")
        current = self.current(model)
        said = ModelWeights(current.revision + 1, dict(weights), current.configured)
        self._learn(Settings({model: said}))
        try:
            async with asyncio.timeout(timeout_s):
                while said.is_later_than(self._directory.weights.get(model)):
                    await self._view.wait()
        except TimeoutError:
            raise Unavailable(
                "these weights hold at this router; the others are told when the directory answers again"
            ) from None

    def _say_configured(self) -> None:
        for name, weights in self._configured.items():
            known = self.settings.weights.get(name) or ModelWeights(0, {}, {})
            if known.configured != weights:
                self._learn(Settings({name: ModelWeights(known.revision + 1, weights, weights)}))
        self._configured = {}

    def _learn(self, told: Settings) -> None:
        before, self.settings = self.settings.weights, self.settings.with_told(told)
        for name, one in self.settings.weights.items():
            if name in self._models and one is not before.get(name):
                log.info("model %s: its versions have the weights %s", name, one.weights)
                self._models[name].weigh(one.weights)
