"""Keys: everything that a page's bytes depend on changes them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvcache.storage.keys import StorageKeys, key_text, visibility
from tests.kvcache.storage.support import MODEL, digests, layout


def test_a_key_has_48_bytes_and_a_readable_visibility() -> None:
    made = StorageKeys(MODEL, [layout()])
    public, private = (made.keys("full", digests(1), tenant)[0] for tenant in ("", "alice"))
    assert len(public) == len(private) == 48
    assert public.startswith(b"public----------")
    assert private.startswith(visibility("alice"))
    assert private[16:] != public[16:], "the visibility, of eight bytes, is not all that tells owners apart"
    assert key_text(public).startswith("public----------")
    assert len(key_text(public)) == 16 + 64


def test_other_weights_layouts_groups_tenants_and_tokens_have_other_keys() -> None:
    seen = set()
    for model in (MODEL, bytes(32)):
        for one in (
            layout(),
            layout(dtype="bfloat16"),
            layout(tile_order="dot_pairs"),
            layout(shape=(4, 2, 2, 16, 8)),
            layout(page_bytes=8192),
        ):
            for tenant in ("", "alice", "bob"):
                for name in ("full", "window"):
                    made = StorageKeys(model, [layout(name, **_changes(one))])
                    seen.update(made.keys(name, digests(3), tenant))
    assert len(seen) == 2 * 5 * 3 * 2 * 3


def _changes(one: object) -> dict[str, object]:
    return {name: getattr(one, name) for name in ("dtype", "tile_order", "shape", "page_bytes")}


@given(st.lists(st.binary(min_size=32, max_size=32), unique=True), st.text())
def test_keys_depend_on_their_page_only(pages: list[bytes], tenant: str) -> None:
    made = StorageKeys(MODEL, [layout()])
    together = made.keys("full", pages, tenant)
    assert together == [made.keys("full", [page], tenant)[0] for page in pages]
    assert len(set(together)) == len(pages)
    assert all(key.startswith(visibility(tenant)) for key in together)
