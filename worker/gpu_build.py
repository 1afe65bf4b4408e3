"""A worker on GPUs: weights, then KV in what they and the largest forward leave of the worker's share.

What a forward needs beside KV is not computed but measured (docs/decisions/0043): the largest one runs over a
pool that holds no more, and decode steps are recorded over it. Where attention is plain torch, which needs
more memory the longer a context is, the same step runs with the longest contexts, too. What the device then
has less is what the worker needs; the real pool takes the rest.
"""

from __future__ import annotations

import gc
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Protocol

import torch
from filelock import FileLock, Timeout

from common.errors import ConfigError
from engine.backends.pick import BackendUnavailable
from engine.config import EngineConfig
from engine.errors import EngineError
from engine.graphs import DecodeLimits
from engine.largest_batch import largest_batch, largest_lens, pages_of
from engine.model_ranks import ModelRanks, rank_devices
from engine.runner import ModelRunner
from engine.spec import ModelSpec
from kvcache.config import MIN_STATE_SLOTS, CacheConfig, KVEventsConfig
from kvcache.layout import pages_in
from kvcache.memory import Memory, build_memory
from kvcache.tiers.config import TierConfig
from worker.capacity import cache_config
from worker.options import WorkerOptions

log = logging.getLogger(__name__)

_ALONE_TIMEOUT_S = 1800.0  # for another worker that loads a large model on this GPU
_FORWARD_TIMEOUT_S = 600.0  # FlashInfer compiles its kernels before the first one
_POLL_S = 0.1  # flock has no wait with a bound


class Gpus(Protocol):
    """The memory of a worker's GPUs, whoever uses it. They are alike; numbers are of the one that has the
    least."""

    names: Sequence[str]  # the same in every process
    total: int  # bytes

    def free(self) -> int:
        """Bytes that nobody has. What this process has given back to its own allocator counts as used."""
        ...

    def give_back(self) -> None:
        """Give the GPUs what this process does not use."""
        ...


class CudaGpus:
    """GPUs of this machine."""

    def __init__(self, devices: Sequence[str]) -> None:
        self._devices = [torch.device(device) for device in devices]
        self.names: Sequence[str] = [
            str(torch.cuda.get_device_properties(device).uuid) for device in self._devices
        ]
        self.total = min(int(torch.cuda.mem_get_info(device)[1]) for device in self._devices)

    def free(self) -> int:
        for device in self._devices:
            torch.cuda.synchronize(device)
        return min(int(torch.cuda.mem_get_info(device)[0]) for device in self._devices)

    def give_back(self) -> None:
        gc.collect()
        torch.cuda.empty_cache()


def build_on_gpu(
    options: WorkerOptions, config: EngineConfig, chosen: CacheConfig, seen: Gpus | None = None
) -> tuple[ModelRunner, Memory]:
    """Load the model and allocate its pools on `config.device`, of several ranks on the GPUs that follow,
    too. What memory they have is by default read from CUDA. Raises ConfigError for what cannot work."""
    devices = rank_devices(config.device, options.tp_size)
    gpus = seen or CudaGpus(_checked(devices))
    if len(devices) > 1:
        chosen = replace(chosen, rank_devices=tuple(devices))
    with _alone(gpus), ExitStack() as opened:
        free = gpus.free()
        share = min(int(gpus.total * options.gpu_memory_utilization), free)
        model = ModelRanks(config, devices, options.first_forward_s)
        opened.callback(model.close)
        loaded = model.loaded
        if loaded.spec.dtype == torch.float32:
            torch.backends.cudnn.allow_tf32 = False  # it is True by default, unlike that of products

        def give_back() -> None:
            gpus.give_back()
            model.give_back()

        def left() -> int:
            give_back()  # what only loading needed
            return gpus.free()

        @cache
        def budget() -> int:
            give_back()
            needed = free - _least_free(gpus, options, config, chosen, model)
            give_back()
            log.info(
                "GPU memory: %d bytes, %d for this worker, %d of them not for KV", gpus.total, share, needed
            )
            return max(0, share - needed)

        sizes = cache_config(options, loaded.spec, chosen, budget, left)
        memory = opened.enter_context(build_memory(sizes, loaded.spec.groups))
        runner = model.open(memory.kv_caches)
        longest = memory.config.max_context_len
        lens = _largest_lens(options, longest)
        _check_step(runner, min(sum(lens), memory.num_pages * memory.page_size), len(lens))
        _record_decode(runner, memory, longest)
        if not budget.cache_info().currsize or runner.kept_formats:
            _run_prompts(runner, memory.page_size, lens[0])
        opened.pop_all()
    return runner, memory


def _checked(devices: Sequence[str]) -> Sequence[str]:
    """Raises ConfigError if one of them does not exist."""
    seen = torch.cuda.device_count()
    if torch.device(devices[-1]).index >= seen:
        raise ConfigError(
            "tp_size",
            f"ranks would compute on {', '.join(devices)}, and torch sees {seen} GPUs",
            "under Ray give the section as many num_gpus",
        )
    return devices


def _least_free(
    gpus: Gpus, options: WorkerOptions, config: EngineConfig, chosen: CacheConfig, model: ModelRanks
) -> int:
    """Bytes that nobody had while the largest forward ran and decode steps were recorded, KV left out."""
    spec, page_size = model.loaded.spec, options.page_size
    longest = min(options.max_context_tokens or spec.max_position, spec.max_position)
    lens = _largest_lens(options, longest)
    total = pages_of(lens, page_size) * page_size
    small = replace(
        chosen,
        total_tokens=total,
        max_context_len=max(lens),
        swa_full_tokens_ratio=1.0,
        state_slots=max(len(lens), MIN_STATE_SLOTS),
        events=KVEventsConfig(),
        tiers=TierConfig(),
    )
    with build_memory(small, spec.groups) as memory:
        runner = model.open(memory.kv_caches, replace(config, overlap=False))
        _check_step(runner, sum(lens), len(lens))
        _record_decode(runner, memory, longest)
        batches = [largest_batch(spec, lens, page_size)]
        if not runner.attention.recordable:
            context = _reachable(_free_without_pools(gpus, memory), chosen, spec, longest)
            batches.append(largest_batch(spec, lens, page_size, context))
        try:
            for batch in batches:
                runner.launch(batch).result(_FORWARD_TIMEOUT_S)
        except EngineError as error:
            contexts = batch.seq_lens.max()
            raise ConfigError(
                "chunked_prefill_size",
                f"a step of {sum(lens)} tokens with contexts of up to {contexts} does not run ({error})",
                "lower chunked_prefill_size, max_running_requests or max_context_tokens",
            ) from error
        runner.grammars.close()  # close() would end the other ranks
        return _free_without_pools(gpus, memory)


def _largest_lens(options: WorkerOptions, longest: int) -> list[int]:
    """New tokens of each sequence of the largest step, with contexts of at most `longest` tokens."""
    tokens = max(min(options.chunked_prefill_size or longest, options.max_prefill_tokens), options.page_size)
    if options.chunked_prefill_size is None:
        tokens = max(tokens, longest)  # a prompt that is longer than a step is not cut
    # Beside chunks of so many tokens, a step may have a decode row of every other request.
    return largest_lens(tokens, min(tokens, longest), options.max_running_requests)


def _check_step(runner: ModelRunner, tokens: int, sequences: int) -> None:
    try:
        runner.attention.check_step(tokens, sequences)
    except BackendUnavailable as error:
        raise ConfigError(
            "chunked_prefill_size",
            f"a step of {tokens} tokens in {sequences} requests is too large ({error})",
            "set it lower, or max_prefill_tokens, or attention_backend: torch",
        ) from error


def _run_prompts(runner: ModelRunner, page_size: int, longest: int) -> None:
    """Short prompts in free pages. FlashInfer compiles its kernels for prompts when one first needs them, and
    Triton ours for stored weights when a product first has so many rows. Both take seconds, FlashInfer's
    maybe minutes: longer than a request's step may."""
    sizes = [min(2, longest)]
    while runner.kept_formats and 2 * sizes[-1] <= longest:
        sizes.append(2 * sizes[-1])
    try:
        for size in sizes:
            runner.launch(largest_batch(runner.spec, [size], page_size)).result(_FORWARD_TIMEOUT_S)
    except EngineError as error:
        raise ConfigError(
            "attention_backend", f"a prompt does not run ({error})", "install what is missing, or use torch"
        ) from error


def _free_without_pools(gpus: Gpus, memory: Memory) -> int:
    """Bytes of a GPU that nobody has, or this memory's pools."""
    ranks = max(1, len(memory.config.rank_devices))
    return gpus.free() + sum(pool.nbytes for pool in memory.kv_caches.values()) // ranks


def _reachable(nbytes: int, chosen: CacheConfig, spec: ModelSpec, longest: int) -> int:
    """Tokens of the longest context that pools of `nbytes` on each GPU would hold; at most `longest`."""
    pages = pages_in(
        nbytes * max(1, len(chosen.rank_devices)), spec.groups, chosen.page_size, chosen.swa_full_tokens_ratio
    )
    return min(longest, pages * chosen.page_size)


def _record_decode(runner: ModelRunner, memory: Memory, longest: int) -> None:
    """Record the largest decode step that can be built over this memory, with contexts of `longest` tokens,
    and the smaller ones."""
    limits = DecodeLimits(
        sequences=memory.config.max_running_requests,
        context_pages=-(-longest // memory.page_size),
        rows=memory.req_to_token_pool.size,
    )
    try:
        runner.record_decode(limits)
    except RuntimeError as error:  # of torch or of FlashInfer, whose workspace is as large as we made it
        raise ConfigError(
            "max_running_requests",
            f"decode steps of up to {limits.sequences} requests cannot be recorded ({error})",
            "lower it if memory or the workspace is too small",
        ) from error


@contextmanager
def _alone(gpus: Gpus) -> Iterator[None]:
    """Nobody else of this user measures these GPUs meanwhile: what another worker is allocating would
    count."""
    with ExitStack() as locks:
        for name in sorted(gpus.names):  # in one order, so that no two workers wait for each other
            locks.enter_context(_locked(name))
        yield


@contextmanager
def _locked(gpu: str) -> Iterator[None]:
    path = Path(tempfile.gettempdir()) / f"baton-gpu-{os.getuid()}-{gpu}.lock"
    # A soft lock, without flock, would outlive a process that is killed.
    held = FileLock(path, timeout=_ALONE_TIMEOUT_S, poll_interval=_POLL_S, fallback_to_soft=False)
    try:
        held.acquire()
    except Timeout:
        raise ConfigError(
            "device",
            f"another worker has been starting on the same GPU for {_ALONE_TIMEOUT_S:g} s ({path} is locked)",
            "see what it waits for, or start again",
        ) from None
    try:
        yield
    finally:
        held.release()
