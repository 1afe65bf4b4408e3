"""The interfaces of attention backends, and the assignment of backends to a model's layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import torch
from torch.nn import functional

from engine.attention_chunks import AttentionChunks
from engine.batch import ForwardBatch, ReadRows
from kvcache.layout import GroupSpec, KVGroupSpec

Value = TypeVar("Value")


class DecoderOutput(NamedTuple):
    """What a decoder that replaces transformers' returns: the one field of its output class that is read. To
    make one of that class takes the host 0.1 ms in a step on a CPU."""

    last_hidden_state: torch.Tensor  # [1, T, hidden]


class AttentionBackend(Protocol):
    """Paged attention over one KV group of keys and values.

    A backend is built as `Backend(pool, query_heads, scale, softcap)`, where `pool` is an MHAKVCache and
    `scale` is the factor on q.k. Unless softcap is None, a scaled score s becomes softcap tanh(s / softcap).
    `pool.spec.window` says how far back a query sees. A backend is used from one thread.
    """

    def prepare(self, batch: ForwardBatch) -> None:
        """Store what every layer needs of the batch. Called once per step, before the first layer."""
        ...

    def forward(
        self,
        place: int,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Write the new tokens' K and V to the batch's out_slots, THEN attend over each sequence's pages.

        place: the layer's index in the group's layer_ids. q: [T, query heads, head_dim]. k_new, v_new: [T, KV
        heads, head_dim]. The last dimension of these is contiguous; the others have the model's strides. out:
        [T, query heads, head_dim], contiguous, filled in place. Query i of a sequence sees its context up to
        and including itself, or the window that ends there. sinks: [query heads] logits that join each
        softmax and carry no value. Writing and attending are one call so that a backend can do both in one
        op.
        """
        ...


class HeadInputs(NamedTuple):
    """What a layer does to its q and k before attention."""

    q_norm: torch.Tensor | None  # [head_dim]: RMSNorm of each head
    k_norm: torch.Tensor | None
    eps: float  # of the norms
    rotary: torch.Tensor | None  # float32 [positions, head_dim]: cosines, then sines, of the halves of a head
    positions: torch.Tensor  # int64 [T]


@runtime_checkable
class AttendsHeads(Protocol):
    """An AttentionBackend that does this, too."""

    def attend(
        self,
        place: int,
        q: torch.Tensor,
        k_new: torch.Tensor,
        v_new: torch.Tensor,
        out: torch.Tensor,
        inputs: HeadInputs,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """forward(), with norms and rotary embedding of q and k before it."""
        ...


class LatentBackend(Protocol):
    """Paged attention over one latent group.

    A backend is built as `Backend(pool, heads, scale)`, where `pool` is an MLAKVCache and `scale` is the
    factor on scores. A backend is used from one thread.
    """

    def prepare(self, batch: ForwardBatch) -> None:
        """Store what every layer needs of the batch. Called once per step, before the first layer."""
        ...

    def forward(
        self,
        place: int,
        q_latent: torch.Tensor,
        q_rope: torch.Tensor,
        latent_new: torch.Tensor,
        rope_new: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor | None = None,
    ) -> None:
        """Write the new tokens' rows to the batch's out_slots, THEN attend over each sequence's pages.

        place: the layer's index in the group's layer_ids. q_latent: [T, heads, kv_lora_rank]. q_rope: [T,
        heads, rope_dim]. latent_new: [T, kv_lora_rank]. rope_new: [T, rope_dim]. The last dimension of these
        is contiguous; the others have the model's strides. out: [T, heads, kv_lora_rank], contiguous, filled
        in place with the weighted sums of latents. Query i of a sequence sees its context up to and including
        itself, or what select() chose of that. sinks: float32 [heads] logits that join each softmax and
        carry no value.
        """
        ...


SumsUp = Callable[[torch.Tensor], torch.Tensor]
"""What tokens' rows have for an indexer, [n, kpool, index_dim] -> the keys of n k-pools, [n, dim]."""


class IndexInputs(NamedTuple):
    """What an indexer says of T new tokens (DeepSeek-V3.2-Exp, section 2.1). The score of a token of the
    context, or of a k-pool, for a query is the sum over the indexer's heads of w_h relu(q_h . k)."""

    q: torch.Tensor  # [T, index heads, dim]
    k: torch.Tensor  # [T, index_dim]: keys, and behind them what keys of k-pools are made of besides
    weights: torch.Tensor  # float32 [T, index heads]
    sums_up: SumsUp | None = None  # None: tokens are scored, not k-pools


class IndexQueries(NamedTuple):
    """The same of an indexer that scores entries of compressed attention, whose keys are in their pages."""

    q: torch.Tensor  # [T, index heads, index_dim]
    weights: torch.Tensor  # float32 [T, index heads]


class Compression(NamedTuple):
    """How a layer of compressed attention makes its entries: each stands for `tokens` tokens, and is made of
    the rows of the `span` tokens with the same last one. Queries attend to the `top` entries that an indexer
    scores highest, or, if it is None, to all before them."""

    tokens: int
    span: int
    top: int | None


class Compressor(Protocol):
    """Makes the entries of a layer."""

    compression: Compression

    def entries(self, rows: torch.Tensor, firsts: torch.Tensor) -> torch.Tensor:
        """Tokens' rows [E, span, width in the window group] -> [E, width in the group of entries].

        firsts: int64 [E], the first token that each entry stands for. Where it is 0, what is before has no
        rows, and `rows` has any there."""
        ...


class CompressedBackend(Protocol):
    """Paged attention over a group of entries and a window group of rows (kvcache/entry_layout.py)."""

    def prepare(self, batch: ForwardBatch) -> None:
        """Store what every layer needs of the batch. Called once per step, before the first layer."""
        ...

    def forward(
        self,
        layer: int,
        q: torch.Tensor,
        rows: torch.Tensor,
        out: torch.Tensor,
        sinks: torch.Tensor,
        compressor: Compressor | None = None,
        index: IndexQueries | None = None,
    ) -> None:
        """Write the new tokens' rows and the entries that they complete, THEN attend.

        q: [T, heads, head_dim]. rows: [T, width in the window group], whose first head_dim values are key and
        value of the token. out: [T, heads, head_dim], contiguous, filled in place. Query i of a sequence sees
        the tokens of the window that ends with it, and the entries that end with it or before. sinks: [heads]
        logits that join each softmax and carry no value. compressor: None in layers without entries."""
        ...


@runtime_checkable
class SelectsTokens(Protocol):
    """A LatentBackend of sparse attention."""

    def select(self, place: int, inputs: IndexInputs) -> None:
        """Write the new tokens' index keys to the batch's out_slots, THEN choose for each new token the
        tokens of its context with the highest scores, to which forward() attends until the next select().
        `place`: as in forward(). Of equal scores any may be chosen."""
        ...


@runtime_checkable
class Recordable(Protocol):
    """A backend whose decode steps can be recorded (engine/graphs.py)."""

    def fixed(self, sequences: int, context_pages: int) -> Any:
        """The same backend for steps of `sequences` decode rows with at most `context_pages` pages each. Its
        forward() reads the batch only on the device, always at the same addresses, to which prepare() copies
        it."""
        ...


@runtime_checkable
class LimitsSteps(Protocol):
    """A backend that cannot take a step of any size."""

    def check_step(self, tokens: int, sequences: int) -> None:
        """Raises BackendUnavailable if it may refuse a step of so many new tokens and sequences."""
        ...


class PagedLayers:
    """A model's attention backends, one per KV group, and the backend of each layer.

    `shared`: layer without keys and values of its own -> the layer whose it reads. transformers gives it
    those of the new tokens, and it writes them again where they are. A backend needs no second form for it.

    `tail`: these layers over backends of their own, for the tokens that are read, if not all are.
    `chunks`: what the layers of the window group attend to, unless it is all of their window.
    """

    def __init__(
        self,
        full: AttentionBackend | None,
        window: AttentionBackend | None,
        groups: Sequence[GroupSpec],
        latent: LatentBackend | None = None,
        compressed: CompressedBackend | None = None,
        shared: Mapping[int, int] | None = None,
        tail: PagedLayers | None = None,
        chunks: AttentionChunks | None = None,
    ) -> None:
        self.full = full
        self.window = window
        self.latent = latent
        self.compressed = compressed
        self._groups = groups
        self._shared = shared or {}
        self.tail = tail
        self._chunks = chunks
        self.reads: ReadRows | None = None  # of the prepared batch
        backends = {"full": full, "window": window}
        self.of_layer: dict[int, tuple[AttentionBackend, int]] = {
            layer: (backend, place)
            for group in groups
            if (backend := backends.get(group.kind)) is not None
            for place, layer in enumerate(group.layer_ids)
        }
        self.of_layer |= _also_of(self.of_layer, self._shared)
        self.width_of_layer = {  # values of a key in a page (engine/row_widths.py)
            layer: group.head_dim
            for group in groups
            if isinstance(group, KVGroupSpec)
            for layer in group.layer_ids
        }
        self.width_of_layer |= _also_of(self.width_of_layer, self._shared)
        self.latent_of_layer: dict[int, tuple[LatentBackend, int]] = {
            layer: (latent, place)
            for group in groups
            if latent is not None and group.kind == "latent"
            for place, layer in enumerate(group.layer_ids)
        }
        self.latent_of_layer |= _also_of(self.latent_of_layer, self._shared)

    def filled_up(self, layer: int, heads: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., width of a layer's rows], zeros behind the D values (engine/row_widths.py)."""
        missing = self.width_of_layer[layer] - heads.shape[-1]
        return heads if missing == 0 else functional.pad(heads, (0, missing))

    @property
    def has_window(self) -> bool:
        """Whether batches need pages of a window group."""
        return self.window is not None or self.compressed is not None

    @property
    def recordable(self) -> bool:
        """Whether decode steps through all of these backends can be recorded."""
        backends = (self.full, self.window, self.latent, self.compressed)
        return all(backend is None or isinstance(backend, Recordable) for backend in backends)

    @property
    def backend_names(self) -> list[str]:
        """The classes of the backends, for operators."""
        backends = (self.full, self.window, self.latent, self.compressed)
        return sorted({type(backend).__name__ for backend in backends if backend is not None})

    def fixed(self, sequences: int, context_pages: int) -> PagedLayers:
        """The same layers over backends for recorded steps, which need no `tail`: all tokens of a decode step
        are read. See Recordable."""

        def fix(backend: Any) -> Any:
            return None if backend is None else backend.fixed(sequences, context_pages)

        full, window = fix(self.full), fix(self.window)
        latent, compressed = fix(self.latent), fix(self.compressed)
        return PagedLayers(full, window, self._groups, latent, compressed, self._shared, chunks=self._chunks)

    def check_step(self, tokens: int, sequences: int) -> None:
        """Raises BackendUnavailable if a backend may refuse a step of so many new tokens and sequences."""
        backends: tuple[object, ...] = (self.full, self.window, self.latent)
        for backend in backends:
            if isinstance(backend, LimitsSteps):
                backend.check_step(tokens, sequences)

    def prepare(self, batch: ForwardBatch) -> None:
        """Prepare every backend. Called once per step, before the first layer."""
        if self.full is not None:
            self.full.prepare(batch)
        if self.window is not None:
            of_window = batch.for_window()
            self.window.prepare(of_window if self._chunks is None else self._chunks.of(of_window))
        if self.latent is not None:
            self.latent.prepare(batch)
        if self.compressed is not None:
            self.compressed.prepare(batch)
        self.reads = batch.read_rows()
        if self.tail is not None and self.reads is not None and len(self.reads.rows):
            self.tail.prepare(batch.only(self.reads))


def _also_of(of_layer: Mapping[int, Value], shared: Mapping[int, int]) -> dict[int, Value]:
    """What layers have that share another's, of those layers that have it themselves."""
    return {layer: of_layer[own] for layer, own in shared.items() if own in of_layer}
