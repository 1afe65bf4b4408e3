"""Pages between pools on GPUs of one host: `python -m bench.gpu_transfer --json [--target cuda:1]`.

Writes of 256 pages of 2 MiB (16 tokens of an 8B model) in random order, grants and ends included. Sender and
receiver are in this process.

`ratios`: cuda_ipc, tcp                        time of torch's copy of as many bytes / our time
`values`: copy_gb_s, cuda_ipc_gb_s, tcp_gb_s   medians of measurements taken in turn

Without a GPU that can share memory it says why, and `ratios` and `values` are empty.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from functools import partial

import numpy as np
import torch

from bench.common import alternate, argument_parser, medians, print_result, seconds
from common.errors import ConfigError
from common.host import host_identity
from kvcache.device_memory import allocate_exported
from kvtransfer.pages import PageWrite
from kvtransfer.region import GroupRegion, region_of
from kvtransfer.select import open_receiver, open_sender
from worker.device import choose_device

PAGES, PAGE_BYTES, PER_WRITE = 384, 2 << 20, 256
ROUNDS = 15
BACKENDS = ("cuda_ipc", "tcp")
_rooms = itertools.count(1)


@contextmanager
def writes(
    backend: str, source: GroupRegion, target: GroupRegion, pages: int
) -> Iterator[Callable[[], float]]:
    """A function that writes so many pages, in random order, and returns the seconds."""
    order = np.random.default_rng(0)
    with (
        closing(open_receiver({"full": target}, backend)) as receiver,
        closing(open_sender({"full": source}, host_identity(), backend)) as sender,
    ):
        (endpoint,) = receiver.endpoints

        def write() -> float:
            room = next(_rooms)
            src, dst = (order.permutation(target.num_pages)[:pages] for _ in range(2))
            receiver.open(room, 0, {"full": dst})
            took = seconds(lambda: sender.write(endpoint, PageWrite(room, 0, "full", src, dst)))
            assert receiver.close_room(room, 0).passed, "a write is over when it returns"
            assert torch.equal(target.tensor[dst[0]].cpu(), source.tensor[src[0]].cpu()), "another page came"
            return took

        yield write


def run(source: GroupRegion, target: GroupRegion, pages: int, rounds: int) -> dict[str, float]:
    """Seconds of a write by each backend, and of torch's copy of as many bytes: medians."""
    with ExitStack() as cleanup:
        sides = {name: cleanup.enter_context(writes(name, source, target, pages)) for name in BACKENDS}
        sides["copy"] = partial(seconds, partial(_copy, source.tensor[:pages], target.tensor[:pages]))
        alternate(sides, 2)  # warm-up
        return medians(alternate(sides, rounds))


def _copy(source: torch.Tensor, target: torch.Tensor) -> None:
    target.copy_(source)
    if target.is_cuda:
        torch.cuda.synchronize(source.device)
        torch.cuda.synchronize(target.device)


def main() -> None:
    """Command line."""
    parser = argument_parser(__doc__)
    parser.add_argument("--source", default="cuda", help="the GPU of the prefill worker")
    parser.add_argument("--target", default="cuda", help="the GPU of the decode worker")
    options = parser.parse_args()
    try:
        source, target = choose_device(options.source), choose_device(options.target)
        buffer = allocate_exported(target, PAGES * PAGE_BYTES)
        if buffer is None:
            raise ConfigError("target", f"memory of {target} cannot be shared", "see the log")
    except ConfigError as error:
        sys.stderr.write(f"bench.gpu_transfer: not measured: {error.problem}\n")
        print_result("gpu_transfer", {}, {}, options.json)
        return
    with buffer:
        mine = torch.randint(0, 256, (PAGES, PAGE_BYTES), dtype=torch.uint8, device=source)
        theirs = region_of(buffer.tensor.view(PAGES, PAGE_BYTES), buffer.fd)
        took = run(region_of(mine), theirs, PER_WRITE, ROUNDS)
    nbytes = PER_WRITE * PAGE_BYTES
    ratios = {name: round(took["copy"] / took[name], 3) for name in BACKENDS}
    values = {f"{name}_gb_s": round(nbytes / took[name] / 1e9, 1) for name in ("copy", *BACKENDS)}
    print_result("gpu_transfer", ratios, values, options.json)


if __name__ == "__main__":
    main()
