"""ModelForward: a model's layers over pages, from token ids to hidden states."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from engine.backends.choose import build_layers
from engine.batch import ForwardBatch
from engine.config import EngineConfig
from engine.cpu.threads import few_tokens
from engine.device_copies import upload
from engine.loader import LoadedModel
from engine.paged_cache import PagedCache
from engine.paged_layers import PagedLayers
from engine.states import PackedStates
from kvcache.pool import KVCache, MambaPool


class ModelForward:
    """The layers of a model, or of a rank's part of it. `pools` holds a pool for each of its groups, by
    name."""

    def __init__(self, loaded: LoadedModel, pools: Mapping[str, KVCache], config: EngineConfig) -> None:
        if config.threads:
            torch.set_num_threads(config.threads)
        self.device = torch.device(config.device)
        self.attention = build_layers(config, loaded, pools)
        states = pools.get("state")
        self.states = PackedStates(states) if isinstance(states, MambaPool) else None
        self.decoder = loaded.model.model

    def of_batch(self, batch: ForwardBatch, input_ids: torch.Tensor) -> torch.Tensor:
        """What the last layer says of each new token, [T, hidden]. `input_ids` [T] are on the device."""
        self.attention.prepare(batch)
        if self.states is not None:
            self.states.prepare(batch)
        positions = upload(batch.positions, self.device)
        return self.of_inputs(input_ids, positions, self.attention, self.states)

    def of_inputs(
        self, ids: torch.Tensor, positions: torch.Tensor, layers: PagedLayers, states: PackedStates | None
    ) -> torch.Tensor:
        """The same of what is on the device. `layers` and `states` are prepared for the batch."""
        output = self.decoder(
            input_ids=ids[None],
            position_ids=positions[None],
            past_key_values=PagedCache(layers, states),
            use_cache=False,
            paged=layers,
        )
        hidden: torch.Tensor = output.last_hidden_state[0]
        return hidden

    def threads_for(self, batch: ForwardBatch) -> AbstractContextManager[None]:
        """Around a forward of the batch: how many threads compute it."""
        return few_tokens(len(batch.positions)) if self.device.type == "cpu" else nullcontext()

    def current_device(self) -> AbstractContextManager[object]:
        """Events, graphs and FlashInfer's plans are on the current device, which is a thread's own."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
