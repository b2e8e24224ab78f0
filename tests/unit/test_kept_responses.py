"""Which responses are kept, for how long and for whom, without a server."""

from __future__ import annotations

import asyncio

import pytest

from openspec.serve.generation.kept_responses import KEEP_S, MAX_KEPT_BYTES, KeptResponses
from openspec.serve.shapes.wire import ApiError


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def keep(kept: KeptResponses, name: str, size: int = 10, owner: bytes | None = None) -> None:
    async def begin() -> None:
        kept.begin(owner, name, [b"i" * size])

    asyncio.run(begin())
    kept.finish(name, {f"item of {name}": b"o" * size})


def has(kept: KeptResponses, name: str, owner: bytes | None = None) -> bool:
    found = []
    for look in (
        lambda: kept.conversation(owner, name),
        lambda: kept.item(owner, f"item of {name}"),
    ):
        try:
            look()
            found.append(True)
        except ApiError as error:
            assert error.status == 404
            found.append(False)
    assert found[0] == found[1]
    return found[0]


def test_the_oldest_make_room() -> None:
    kept = KeptResponses()
    for number in range(5):
        keep(kept, str(number), MAX_KEPT_BYTES // 8)
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


def test_an_answer_that_is_being_made_is_not_there_yet() -> None:
    kept = KeptResponses()

    async def begin() -> None:
        kept.begin(None, "a", [b"i"])

    asyncio.run(begin())
    assert not has(kept, "a")
    kept.clear()
    kept.finish("a", {"item of a": b"o"})
    assert not has(kept, "a") and kept.num_bytes == 0
