"""What the page `/ui` shows of the whole server."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.serve.conftest import RunningServer
from tests.ui.conftest import Visit


@pytest.mark.parametrize(
    ("draft", "both", "split"),
    [
        (0.01, 0.0, "draft 1.00 ms, verify 3.00 ms, rest 0.20 ms"),
        (0.0, 0.02, "verify 3.00 ms, both 2.00 ms, rest 0.20 ms"),
    ],
)
def test_server_numbers(
    visit: Callable[..., Visit], scripted: RunningServer, draft: float, both: float, split: str
) -> None:
    """Two engines as one: counters and batch are summed, the share of KV is a mean."""
    num_asked = 0

    def answer(route) -> None:
        nonlocal num_asked
        num_asked += 1
        lines = []
        for engine, usage in (("0", 0.25), ("1", 0.75)):
            for name, value in (
                ("generation_tokens_total", 100 * num_asked),
                ("spec_decode_num_drafts_total", 10 * num_asked),
                ("spec_decode_num_accepted_tokens_total", 15 * num_asked),
                ("kv_cache_usage_perc", usage),
                ("engine_steps_total", 10 * num_asked),
                ('engine_step_seconds_total{part="draft"}', draft * num_asked),
                ('engine_step_seconds_total{part="verify"}', 0.03 * num_asked),
                ('engine_step_seconds_total{part="draft_and_verify"}', both * num_asked),
                ('engine_step_seconds_total{part="rest"}', 0.002 * num_asked),
                ("num_requests_running", 1 + int(engine)),
                ("num_requests_waiting", 4),
            ):
                name, _, part = name.rstrip("}").partition("{")
                labels = ",".join(['model_name="m"', f'engine="{engine}"', *[part] * bool(part)])
                lines.append(f"openspec:{name}{{{labels}}} {value}")
            # Of ten drafts eight have a second token, and none a third.
            for what, counts in (("accepted_tokens", (9, 6, 0)), ("drafts", (10, 8, 0))):
                for position, count in enumerate(counts):
                    labels = f'engine="{engine}",position="{position}"'
                    name = f"openspec:spec_decode_num_{what}_per_pos_total"
                    lines.append(f"{name}{{{labels}}} {count * num_asked}.0")
        route.fulfill(body="\n".join(lines))

    one = visit(scripted.url, setup=lambda page: page.route("**/metrics", answer))
    one.page.wait_for_selector("#server-numbers dd")
    names = one.page.locator("#server-numbers dt").all_inner_texts()
    values = one.page.locator("#server-numbers dd").all_inner_texts()
    shown = dict(zip(names, values, strict=True))
    assert shown["mean acceptance length"] == "2.50"
    assert shown["KV in use"] == "50.0 %"
    assert (shown["batch"], shown["waiting"]) == ("3", "8")
    assert 0 < float(shown["tokens a second"]) <= 200
    title = one.page.get_attribute("#server-positions svg", "aria-label")
    assert title is not None and title.endswith("1: 90 percent, 2: 75 percent, 3: none")
    shown_split = one.page.get_attribute("#server-split svg", "aria-label")
    assert shown_split == f"Step time: {split}"
