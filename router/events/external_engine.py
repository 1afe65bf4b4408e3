"""ExternalHashes: translates the blocks of another engine into Baton's pages.

The index looks prompts up by page hash (wire/page_hash.py). vLLM and SGLang name blocks by hashes of their
own. So page hashes are computed here from the token_ids of the events. The pages of each block are kept,
because an event that removes a block has only its name.

block      the engine's unit, under its own hash: one page, several pages, or a part of a page
state      the digest after the last whole page and the tokens since; the next block continues from it
namespace  lora_name, cache_salt and extra_keys. They are the seed of the page hashes; other keys are mixed in

A namespace that cannot be determined exactly becomes one that no request uses. So a hit may be missed, but
none is wrong. A page made of several blocks is stored with the last of them and removed with the last,
because engines evict the tail of a prefix first. Each block that the engine holds takes about 250 bytes here.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import msgspec

from common.errors import WireError
from router.index.global_index import GlobalIndex, digest_hashes
from wire.events import (
    MEDIA,
    AllBlocksCleared,
    AnyEvent,
    BlockRemoved,
    BlockStored,
    Unread,
    UnreadKind,
    decode_batch,
)
from wire.page_hash import PageDigest, namespace_seed, page_digests

_DIGEST = 32
_TOKEN = 4
_64_BITS = 0xFFFF_FFFF_FFFF_FFFF  # engines write hashes signed or unsigned

_State = bytes  # a digest and int32 tokens; or, for a block of whole pages, the digests of its pages

_seed = lru_cache(4096)(namespace_seed)


class Unusable(WireError):
    """An event that cannot be translated, and the kind of the reason."""

    def __init__(self, kind: UnreadKind, reason: str) -> None:
        super().__init__(reason)
        self.kind: UnreadKind = kind


class ExternalHashes:
    """The blocks of one worker."""

    def __init__(self, model: str, page_size: int) -> None:
        """`model` and `page_size` are those of the prompts' page hashes."""
        self._model = model
        self._page_size = page_size
        self._block_size = page_size  # of the blocks here: an engine has one size
        self._blocks: dict[str, dict[int, _State]] = {medium: {} for medium in ("GPU", "CPU", "STORAGE")}
        self._primary: dict[int, bool] = {}  # by vLLM's group index

    def __len__(self) -> int:
        """The number of blocks, counted per tier."""
        return sum(map(len, self._blocks.values()))

    def clear(self) -> None:
        """Forget all blocks: the engine's cache was reset, or events were lost."""
        for blocks in self._blocks.values():
            blocks.clear()

    def stored(self, event: BlockStored) -> list[PageDigest]:
        """Return the pages that are complete now. Raises Unusable, and then nothing has changed."""
        blocks = self._tier(event)
        self._check_stored_group(event)
        names = [name & _64_BITS for name in event.block_hashes]
        if not event.token_ids:  # vLLM's offloading: blocks of an earlier event are in another tier now
            states = [self._known(name) for name in names]
            pages = [page for state in states for page in self._pages(state)]
        else:
            states, pages = self._hash(event, len(names))
        blocks.update(zip(names, states, strict=True))
        return pages

    def removed(self, event: BlockRemoved) -> list[PageDigest]:
        """Return the pages that are no longer complete. Unknown blocks have none. Raises Unusable."""
        blocks = self._tier(event)
        if event.group_idx is not None and not self._primary.get(event.group_idx, event.group_idx == 0):
            raise Unusable("other_group", f"group {event.group_idx} does not decide reuse")
        pages: list[PageDigest] = []
        for name in event.block_hashes:
            state = blocks.pop(name & _64_BITS, None)
            if state is not None:
                pages += self._pages(state)
        return pages

    # -- tiers and groups --------------------------------------------------------------------------

    def _tier(self, event: BlockStored | BlockRemoved) -> dict[int, _State]:
        medium = MEDIA.get((event.medium or "GPU").upper())
        if medium is None:
            raise Unusable("medium", f"unknown medium {event.medium!r}")
        return self._blocks[medium]

    def _check_stored_group(self, event: BlockStored) -> None:
        """Only full attention or latents decide reuse. BlockRemoved has no more than a group's index."""
        index, kind = event.group_idx, event.kv_cache_spec_kind
        decides = index in (None, 0)
        if kind is not None:
            decides = "sliding" not in kind and ("full" in kind or "mla" in kind)
            if index is not None:
                self._primary[index] = decides
        if not decides:
            raise Unusable("other_group", f"group {index} ({kind}) does not decide reuse")

    def _known(self, name: int) -> _State:
        for blocks in self._blocks.values():
            state = blocks.get(name)
            if state is not None:
                return state
        raise Unusable("orphan", f"block {name} is not known")

    # -- hashing -----------------------------------------------------------------------------------

    def _hash(self, event: BlockStored, count: int) -> tuple[list[_State], list[PageDigest]]:
        """Return the state after each block, and the pages that the blocks complete."""
        size = event.block_size
        self._check_size(size)
        if len(event.token_ids) != count * size:
            raise Unusable("malformed", f"{len(event.token_ids)} tokens in {count} blocks of {size}")
        try:
            tokens = array("i", event.token_ids).tobytes()
        except (TypeError, OverflowError) as error:
            raise Unusable("malformed", f"token_ids: {error}") from error
        seed, keys = self._namespace(event, count)
        parent = event.parent_block_hash
        state = seed if parent is None else self._after(self._known(parent & _64_BITS))
        if not any(keys):
            return self._extend(state, tokens, size)
        states: list[_State] = []
        pages: list[PageDigest] = []
        for i, own in enumerate(keys):
            state = _fold(state, own) if own else state
            (last,), whole = self._extend(state, tokens[i * size * _TOKEN : (i + 1) * size * _TOKEN], size)
            states.append(last)
            pages += whole
            state = self._after(last)
        return states, pages

    def _extend(self, state: _State, tokens: bytes, size: int) -> tuple[list[_State], list[PageDigest]]:
        """The same for blocks of `size` tokens that continue `state`."""
        page, digest = self._page_size, state[:_DIGEST]
        raw = state[_DIGEST:] + tokens
        pages = page_digests(digest, raw, page)
        if size == page:
            return pages, pages
        if size > page:
            each = size // page
            return [b"".join(pages[i : i + each]) for i in range(0, len(pages), each)], pages
        states = []
        step = size * _TOKEN
        for end in range(len(state) - _DIGEST + step, len(raw) + 1, step):
            whole = end // (page * _TOKEN)
            states.append((pages[whole - 1] if whole else digest) + raw[whole * page * _TOKEN : end])
        return states, pages

    def _check_size(self, size: int) -> None:
        page = self._page_size
        if size < 1 or (size % page and page % size):
            raise Unusable(
                "block_size",
                f"blocks of {size} tokens are neither a multiple nor a divisor of pages of {page}",
            )
        if size != self._block_size:
            if len(self):
                raise Unusable("block_size", f"blocks of {size} tokens after blocks of {self._block_size}")
            self._block_size = size

    def _after(self, state: _State) -> _State:
        """The state from which the next block continues."""
        return state[-_DIGEST:] if self._holds_pages(state) else state

    def _pages(self, state: _State) -> list[PageDigest]:
        """The pages that a block completes."""
        if not self._holds_pages(state):
            return []
        return [state[i : i + _DIGEST] for i in range(0, len(state), _DIGEST)]

    def _holds_pages(self, state: _State) -> bool:
        """Whether a block's state is a list of whole pages, not a digest and tokens."""
        return len(state) == _DIGEST or self._block_size > self._page_size

    def _namespace(self, event: BlockStored, count: int) -> tuple[PageDigest, list[list[Any]]]:
        """The seed of the page hashes, and per block the extra keys that are not in the seed.

        vLLM lists per block the hashes of images with their offsets, the LoRA's name, and in the first block
        of a prompt the cache salt.
        """
        lora = event.lora_name or (f"lora_id:{event.lora_id}" if event.lora_id else "")
        salt = event.cache_salt or ""
        if event.extra_keys is None:
            return _seed(self._model, lora, salt), []
        if len(event.extra_keys) != count or not all(isinstance(o, list | None) for o in event.extra_keys):
            raise Unusable("malformed", f"extra_keys are not {count} lists: {event.extra_keys!r:.80}")
        keys = [[key for key in own or () if key != lora] for own in event.extra_keys]
        if event.parent_block_hash is None and not salt and count:
            salts = [key for key in keys[0] if isinstance(key, str)]
            if len(salts) == 1:
                salt = salts[0]
                keys[0].remove(salt)
        return _seed(self._model, lora, salt), keys


class ExternalReader:
    """Applies one worker's batches to the index, through ExternalHashes."""

    def __init__(self, index: GlobalIndex, worker: str, hashes: ExternalHashes) -> None:
        self._index = index
        self._worker = worker
        self._hashes = hashes

    def apply(self, payload: bytes) -> Sequence[Unread]:
        """Apply one batch. Returns the events that could not be used; raises WireError when none could."""
        batch = decode_batch(payload)
        unread = batch.unread
        for event in batch.events:
            try:
                self._apply(event)
            except Unusable as error:
                unread.append(Unread(event, str(error), error.kind))
        return unread

    def clear(self) -> None:
        """Forget all pages of this worker."""
        self._hashes.clear()
        self._index.clear(self._worker)

    def _apply(self, event: AnyEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.clear()
            return
        if isinstance(event, BlockStored):
            if pages := self._hashes.stored(event):
                self._index.store(self._worker, digest_hashes(pages), event.medium)
        elif pages := self._hashes.removed(event):
            self._index.remove(self._worker, digest_hashes(pages), event.medium)


def _fold(state: _State, keys: list[Any]) -> _State:
    """Mix keys into a state. Other keys lead to another state."""
    chain = hashlib.sha256(b"baton-foreign-keys" + state[:_DIGEST] + msgspec.msgpack.encode(keys))
    return chain.digest() + state[_DIGEST:]
