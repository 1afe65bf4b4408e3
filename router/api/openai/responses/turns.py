"""Turns that are kept: found by the ids of their responses, and by those of their items."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from common.errors import ResponseNotFound
from router.api.openai.responses.history import template_messages
from router.api.openai.responses.items import GivenItem, Item, ItemReference, told_items
from router.api.openai.responses.output import OutputItems, response_of
from router.kept_responses import ResponseKey
from router.service import Router

Messages = list[dict[str, Any]]


class Turn(msgspec.Struct):
    """What is kept: a response, and all messages of its conversation, the answer's too."""

    response: dict[str, Any]
    messages: Messages


async def find_turn(router: Router, key: ResponseKey, param: str | None) -> Turn:
    """Raises ResponseNotFound, also for a response of another tenant."""
    kept = await router.responses.find(key)
    if kept is None:
        raise ResponseNotFound(f"no response {key.id[:64]!r} is kept", param)
    return msgspec.json.decode(kept, type=Turn)


def keep_turn(
    router: Router,
    key: ResponseKey,
    before: Messages,
    items: Sequence[Item],
    response: dict[str, Any],
    output: OutputItems,
) -> None:
    """Keep a response with its conversation; `before` are the messages of earlier turns. It says itself
    whether it could be kept."""
    said = [*before, *template_messages(before, [*items, *told_items(output.whole)])]
    response["store"] = router.responses.keep(key, msgspec.json.encode(Turn(response, said)))


async def with_items(router: Router, tenant: str, given: Sequence[GivenItem]) -> list[Item]:
    """The items, with kept ones in the place of references to them. Raises ResponseNotFound."""
    found: dict[str, dict[str, Any]] = {}  # the items of kept responses that were asked for, by id
    items: list[Item] = []
    for place, item in enumerate(given):
        if not isinstance(item, ItemReference):
            items.append(item)
            continue
        if item.id not in found:
            turn = await find_turn(router, ResponseKey(tenant, response_of(item.id)), "input")
            found |= {one["id"]: one for one in turn.response["output"]}
        if item.id not in found:
            raise ResponseNotFound(f"input.{place}: no item {item.id[:64]!r} is kept", "input")
        items += told_items([found[item.id]])
    return items
