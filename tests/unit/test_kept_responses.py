"""Which responses are kept, for how long and for whom, without a server."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from openspec.serve.generation.kept_responses import KEEP_S, MAX_KEPT_BYTES, KeptResponses
from openspec.serve.shapes.input_items import KeptItem
from openspec.serve.shapes.response_items import Item, ResponseObject, TextPart
from openspec.serve.shapes.wire import ApiError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def answer(name: str, size: int) -> ResponseObject:
    """A response of about `size` bytes."""
    text = TextPart(type="output_text", text="o" * size)
    item = Item(id=f"item of {name}", type="message", role="assistant", content=[text])
    null = msgspec.Raw(b"null")
    return ResponseObject(
        id=name,
        created_at=0,
        instructions=null,
        max_output_tokens=None,
        metadata=null,
        model="m",
        output=[item],
        parallel_tool_calls=True,
        previous_response_id=None,
        reasoning={},
        seed=None,
        store=True,
        temperature=1.0,
        text=null,
        tool_choice=null,
        tools=null,
        top_p=1.0,
        user=null,
    )


def keep(kept: KeptResponses, name: str, size: int = 10, owner: bytes | None = None) -> None:
    async def begin() -> None:
        kept.begin(owner, name, [KeptItem(f"input of {name}", b"i" * size, True)])

    asyncio.run(begin())
    kept.finish(answer(name, size))


def has(kept: KeptResponses, name: str, owner: bytes | None = None) -> bool:
    found = []
    for look in (
        lambda: kept.conversation(owner, name),
        lambda: kept.item(owner, f"item of {name}"),
        lambda: kept.item(owner, f"input of {name}"),
        lambda: kept.answer(owner, name),
        lambda: kept.input_items(owner, name),
    ):
        try:
            look()
            found.append(True)
        except ApiError as error:
            assert error.status == 404
            found.append(False)
    assert len(set(found)) == 1
    return found[0]


def test_the_oldest_make_room() -> None:
    kept = KeptResponses()
    for number in range(5):
        keep(kept, str(number), MAX_KEPT_BYTES // 9)
        assert kept.num_bytes <= MAX_KEPT_BYTES
    assert [has(kept, str(number)) for number in range(5)] == [False, True, True, True, True]
    keep(kept, "large", MAX_KEPT_BYTES)
    assert not has(kept, "large") and kept.num_bytes == 0


def test_all_are_forgotten_in_time() -> None:
    clock = Clock()
    kept = KeptResponses(clock)
    keep(kept, "a")
    clock.now = KEEP_S - 1
    keep(kept, "b")
    assert has(kept, "a")
    clock.now = KEEP_S + 1
    assert not has(kept, "a") and has(kept, "b")
    clock.now = 2 * KEEP_S
    kept.drop_old()
    assert kept.num_bytes == 0


@pytest.mark.parametrize("owner", [None, b"other"])
def test_others_find_nothing(owner: bytes | None) -> None:
    kept = KeptResponses()
    keep(kept, "a", owner=b"key")
    assert has(kept, "a", b"key") and not has(kept, "a", owner)
    with pytest.raises(ApiError, match="is not kept"):
        kept.delete(owner, "a")
    assert has(kept, "a", b"key")


def test_what_is_deleted_takes_no_room() -> None:
    kept = KeptResponses()
    for name in "ab":
        keep(kept, name)
    kept.delete(None, "a")
    assert not has(kept, "a") and has(kept, "b")
    with pytest.raises(ApiError, match="The response 'a' is not kept"):
        kept.delete(None, "a")
    kept.delete(None, "b")
    assert kept.num_bytes == 0


def test_items_stay_as_long_as_a_conversation_that_holds_them() -> None:
    clock = Clock()
    kept = KeptResponses(clock)
    keep(kept, "a")
    clock.now = KEEP_S / 2
    shown = kept.item(None, "item of a")
    items = [KeptItem("item of a", b"changed", False), KeptItem("invented", b"x", False)]

    async def begin() -> None:
        kept.begin(None, "b", items)

    asyncio.run(begin())
    kept.finish(answer("b", 1))
    for gone in ("input of a", "invented"):
        clock.now = KEEP_S + 1
        with pytest.raises(ApiError, match="is not kept"):
            kept.item(None, gone)
    assert kept.item(None, "item of a") == shown != kept.item(None, "item of b")
    kept.delete(None, "b")
    with pytest.raises(ApiError, match="is not kept"):
        kept.item(None, "item of a")
    assert kept.num_bytes == 0


def test_an_answer_that_is_being_made_is_not_there_yet() -> None:
    kept = KeptResponses()

    async def begin() -> None:
        kept.begin(None, "a", [KeptItem("input of a", b"i", True)])

    asyncio.run(begin())
    assert not has(kept, "a")
    kept.clear()
    kept.finish(answer("a", 1))
    assert not has(kept, "a") and kept.num_bytes == 0
