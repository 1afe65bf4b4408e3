"""ModelPart: what a rank other than 0 computes with; serve(): what its process does."""

from __future__ import annotations

import gc
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, NoReturn

import torch

from engine.device_copies import upload
from engine.forward import ModelForward
from engine.graphs import CudaRecorder, DecodeGraphs, DecodeLimits, Recorder, StepInputs
from engine.loader import LoadedModel, load_model
from engine.paged_layers import PagedLayers
from engine.parallel.group import RankGroup, SharedMemoryGroup, memory_bytes
from engine.parallel.head import is_divided_head
from engine.parallel.nccl import NcclGroup
from engine.ranks.messages import (
    Compute,
    GiveBack,
    LoadPart,
    OpenPools,
    RankSocket,
    Ready,
    RecordDecode,
)
from engine.ranks.pools import map_pools
from engine.states import PackedStates
from kvcache.buffers import SharedBuffer
from kvcache.pool import KVCache


class PartOutputs(NamedTuple):
    """What a recorded step leaves in a rank that does not sample."""

    hidden: torch.Tensor  # [S, hidden]


class ModelPart:
    """A rank other than 0: computes what rank 0 computes, at the same time, with its own part."""

    def __init__(
        self, loaded: LoadedModel, pools: Mapping[str, KVCache], load: LoadPart, group: RankGroup
    ) -> None:
        self.forward = ModelForward(loaded, pools, load.config)
        self._group = group
        head = loaded.model.lm_head
        self._head = head if is_divided_head(head) else None
        self._graphs: DecodeGraphs[PartOutputs] | None = None

    def record_decode(self, limits: DecodeLimits, recorder: Recorder) -> None:
        """As ModelRunner.record_decode, at the same time."""
        forward = self.forward
        self._graphs = DecodeGraphs(
            limits, forward.attention, forward.states, self._step, recorder, forward.device
        )
        with torch.inference_mode(), forward.current_device():
            self._graphs.record_all()

    def compute(self, order: Compute) -> None:
        """On a GPU the forward is only queued: rank 0 launches no more than it has results of."""
        batch, forward = order.batch(), self.forward
        with torch.inference_mode(), forward.current_device(), forward.threads_for(batch):
            if self._graphs is not None and self._graphs.computes(batch):
                hidden = self._graphs.run(batch).outputs.hidden
            else:
                ids = torch.empty(len(batch.positions), dtype=torch.int64, device=forward.device)
                self._group.share(ids)
                hidden = forward.of_batch(batch, ids)
            if self._head is not None:
                for tokens in order.head_calls():
                    self._head(hidden[upload(tokens, forward.device)])

    def _step(self, inputs: StepInputs, layers: PagedLayers, states: PackedStates | None) -> PartOutputs:
        self._group.share(inputs.input_ids)
        hidden = self.forward.of_inputs(inputs.input_ids, inputs.positions, layers, states)
        if self._head is not None:
            self._head(hidden)
        return PartOutputs(hidden)


def serve(orders: RankSocket) -> NoReturn:
    """Do what rank 0 says. Raises OSError or EOFError when it hangs up, and ConfigError."""
    load = orders.order()
    assert isinstance(load, LoadPart)
    group = _meet(load, orders)
    loaded = load_model(load.config, group)
    orders.send(Ready())
    rank: ModelPart | None = None
    while True:
        order = orders.order()
        if isinstance(order, Compute):
            assert rank is not None, "no pools are open"
            rank.compute(order)
            continue
        if isinstance(order, OpenPools):
            device = torch.device(load.config.device)
            rank = ModelPart(loaded, map_pools(order, loaded.spec.groups, group, device, orders), load, group)
        elif isinstance(order, RecordDecode):
            assert rank is not None, "no pools are open"
            limits = DecodeLimits(order.sequences, order.context_pages, order.rows)
            rank.record_decode(limits, CudaRecorder())
        else:
            assert isinstance(order, GiveBack)
            rank = None
            gc.collect()
            torch.cuda.empty_cache()
        orders.send(Ready())


def _meet(load: LoadPart, orders: RankSocket) -> RankGroup:
    if load.meeting:
        orders.send(Ready())
        device = torch.device(load.config.device)
        return NcclGroup(load.rank, load.size, Path(load.meeting), device)
    memory, to_rank_0 = orders.receive_fds(2)
    orders.send(Ready())
    wait = socket.socket(fileno=to_rank_0)
    wait.settimeout(load.timeout_s)
    return SharedMemoryGroup(load.rank, SharedBuffer(memory, memory_bytes(load.size)), [wait], load.size)
