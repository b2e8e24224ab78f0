"""Places for work: the smallest first, and none is lost."""

from __future__ import annotations

import asyncio
import random

from openspec.text.turns import SMALL, Lanes, Turns


def test_the_smallest_goes_first() -> None:
    async def run() -> list[int]:
        turns, order = Turns(1), []

        async def work(size: int) -> None:
            async with turns.turn(size):
                order.append(size)
                await asyncio.sleep(0)

        await asyncio.gather(*(work(size) for size in (5, 9, 3, 7, 3)))
        return order

    assert asyncio.run(run()) == [5, 3, 3, 7, 9]


def test_small_work_has_places_of_its_own() -> None:
    async def run() -> None:
        lanes = Lanes(1, 1)
        await lanes.of(SMALL + 1).enter(SMALL + 1)
        await asyncio.wait_for(lanes.of(SMALL).enter(SMALL), 1)

    asyncio.run(run())


def test_no_place_is_lost_where_those_who_wait_leave() -> None:
    async def run() -> None:
        rng, turns = random.Random(4), Turns(2)
        num_inside = 0

        async def work(size: int) -> None:
            nonlocal num_inside
            async with turns.turn(size):
                num_inside += 1
                assert num_inside <= 2
                try:
                    await asyncio.sleep(0)
                finally:
                    num_inside -= 1

        for _ in range(300):
            tasks = [asyncio.create_task(work(rng.randrange(9))) for _ in range(8)]
            for _ in range(rng.randrange(6)):
                await asyncio.sleep(0)
                rng.choice(tasks).cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        async with turns.turn(1), turns.turn(1):
            assert not turns._waiting and turns._num_free == 0

    asyncio.run(run())
