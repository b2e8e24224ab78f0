"""Admission: which pages a newcomer must leave free."""

from __future__ import annotations

import pytest

from tests.unit.fake_core import make_core, make_request
from tests.unit.fake_runner import FakeRunner

PAGE = 4


def num_running_with(
    newcomer_pages: int, prompts: list[list[int]], num_rows: int, num_pages: int = 32
) -> tuple[int, int]:
    """Free pages after a step of these prompts, and who runs when a newcomer could have joined."""
    runner = FakeRunner(
        num_pages=num_pages,
        page_size=PAGE,
        max_model_len=256,
        max_num_batched_tokens=num_rows,
        max_draft_tokens=0,
        enable_prefix_caching=False,
    )
    core = make_core(runner)
    for number, prompt in enumerate(prompts):
        core.add_request(make_request(f"r{number}", prompt, max_tokens=30))
    core.step()
    num_free = core.stats().num_free_pages
    core.add_request(make_request("newcomer", [9] * (newcomer_pages * PAGE)))
    core.step()
    return num_free, core.stats().num_running


@pytest.mark.parametrize(("needed", "is_admitted"), [(23, True), (24, False), (26, False)])
def test_a_page_is_kept_for_each_running_sequence(needed: int, is_admitted: bool) -> None:
    """Of 26 free pages 3 are kept; the step itself takes none of them."""
    found = num_running_with(needed, [[number] * 5 for number in range(3)], num_rows=64)
    assert found == (26, 3 + is_admitted)


@pytest.mark.parametrize(("needed", "is_admitted"), [(2, True), (3, False)])
def test_an_eighth_of_all_pages_is_kept_at_most(needed: int, is_admitted: bool) -> None:
    found = num_running_with(needed, [[n] * 5 for n in range(3)], num_rows=64, num_pages=9)
    assert found == (3, 3 + is_admitted)


@pytest.mark.parametrize(("needed", "is_admitted"), [(21, True), (22, False)])
def test_pages_are_kept_for_prompts_on_their_way(needed: int, is_admitted: bool) -> None:
    """Of 26 free pages 4 are promised to the rest of a prompt, which has one more as it runs."""
    found = num_running_with(needed, [[1] * 40], num_rows=24)
    assert found == (26, 1 + is_admitted)
