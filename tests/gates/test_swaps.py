"""Draft heads take each other's place while requests run: no token changes."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from openspec.config import EMBEDDED_MODEL
from openspec.engine.core.engine_core import EngineCore
from openspec.errors import RequestError
from openspec.messages import DrafterState, EngineOutput, mean_acceptance_length
from tests.gates.conftest import VARIANTS, Reference, drafter_settings
from tests.gates.grammars import grammar_core, grammar_jobs, plain
from tests.gates.harness import Job, kv_memory, make_core, run, texts
from tests.gates.workload import jobs
from tests.heads.other import make, noisy

HEADS = ("eagle3", "peagle", "dflash", "dspark", "dflash2", "draft_model", "mtp")
EVERY_HEAD = [
    pytest.param(name, marks=() if name == "eagle3" else pytest.mark.full)
    for name in (*HEADS, *VARIANTS)
    if name.partition(" ")[0] in HEADS
]


def head_folder(name: str) -> Path:
    settings = drafter_settings(name)
    return Path(str(settings["draft_model"] or EMBEDDED_MODEL / str(settings["method"])))


def swapping_settings(name: str, root: Path) -> dict[str, object]:
    """Settings of an engine that may take the head "noisy", which is wrong all the time."""
    if not (root / "noisy").exists():
        make(head_folder(name), root / "noisy", noisy)
    return {**drafter_settings(name), "drafter_dir": str(root)}


def load(core: EngineCore, path: str = "noisy", **settings: object) -> DrafterState:
    core.drafters.begin_load(path).result()
    return core.exchange_drafter(**settings)  # type: ignore[arg-type]


def at_every_step(
    core: EngineCore, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Has `act` called before each step."""
    step = core.step

    def act_and_step() -> list[EngineOutput]:
        act()
        return step()

    monkeypatch.setattr(core, "step", act_and_step)


def swap_at_every_step(core: EngineCore, monkeypatch: pytest.MonkeyPatch) -> None:
    load(core)
    at_every_step(core, lambda: core.exchange_drafter(back=True), monkeypatch)


@pytest.mark.parametrize("name", EVERY_HEAD)
@pytest.mark.parametrize(
    "num_pages",
    [pytest.param(14, marks=pytest.mark.full, id="preemption"), pytest.param(None, id="room")],
)
def test_a_swap_at_every_step(
    name: str,
    num_pages: int | None,
    reference: Reference,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Greedy and sampled, with prompts in chunks; the second time with prefixes of either head."""
    settings = {**swapping_settings(name, tmp_path), "max_model_len": 200}
    settings["adaptive_speculation"] = False  # what was learned of a head goes with it
    if num_pages is not None:
        settings["kv_cache_memory"] = kv_memory(num_pages, **settings)
    core = make_core(**settings)
    swap_at_every_step(core, monkeypatch)
    batch = jobs("mixed", 16 if num_pages else 8)
    expected = texts(reference(batch))
    assert texts(run(core, batch)) == expected
    assert texts(run(core, batch)) == expected
    stats, state = core.stats(), core.drafter_state()
    assert state.num_swaps > 50
    assert state.previous is not None
    assert stats.num_drafter_failures == 0
    # Of few pages no prefix may be left when its prompt comes again.
    assert stats.prefix_cache_hits > 0 if num_pages is None else stats.num_preemptions > 0
    drafts = [state.counters.num_drafts, state.previous.counters.num_drafts]
    assert all(drafts)
    assert sum(drafts) == stats.num_drafts


@pytest.mark.full
def test_swaps_under_grammars(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = grammar_jobs("json_schema", "mixed", 9)
    core = grammar_core(**swapping_settings("eagle3", tmp_path))
    swap_at_every_step(core, monkeypatch)
    assert texts(run(core, batch)) == texts(plain(batch))


@pytest.mark.full
def test_heads_are_loaded_beside_steps(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a thread, again and again, one that is refused among them."""
    core = make_core(**swapping_settings("eagle3", tmp_path))
    make(head_folder("eagle3"), tmp_path / "same", lambda _, tensor: tensor)
    paths = ["noisy", "same", "nowhere"]
    outcomes: list[str] = []

    def turn() -> None:
        if core.drafters.is_loading:
            if (load := core.drafters.take_load()) is None:
                return
            if load.exception() is None:
                core.exchange_drafter()
            outcomes.append(type(load.exception()).__name__)
        core.drafters.begin_load(paths[len(outcomes) % len(paths)])

    at_every_step(core, turn, monkeypatch)
    batch = jobs("mixed", 16)
    while len(outcomes) < 6:
        assert texts(run(core, batch)) == texts(reference(batch))
    assert outcomes[:3] == ["NoneType", "NoneType", "RequestError"]


def lengths(core: EngineCore, batch: Sequence[Job]) -> float:
    """Tokens of a step of these jobs."""
    run(core, batch)
    return mean_acceptance_length(core.drafter_state().counters)


def test_a_rollback_brings_the_same_drafts_back(tmp_path: Path) -> None:
    """A head that went and came back drafts as it did, and its counters are its own."""
    settings = swapping_settings("eagle3", tmp_path)
    settings |= {"adaptive_speculation": False, "enable_prefix_caching": False}
    core, batch = make_core(**settings), jobs("greedy", 4)
    before = lengths(core, batch)
    first = core.drafter_state()
    assert (first.version, first.previous) == (1, None)
    state = load(core)
    assert (state.version, state.counters.num_drafts) == (2, 0)
    assert state.previous is not None
    assert state.previous.counters == first.counters
    assert lengths(core, batch) < 1.2 < before
    state = core.exchange_drafter(back=True)
    assert (state.version, state.counters) == (1, first.counters)
    run(core, batch)
    again = core.drafter_state().counters
    assert again.num_drafts == 2 * first.counters.num_drafts
    assert again.num_accepted_tokens == 2 * first.counters.num_accepted_tokens
    assert core.exchange_drafter(back=True).version == 2
    assert load(core).version == 3


@pytest.mark.full
def test_a_failure_in_between_changes_nothing(reference: Reference, tmp_path: Path) -> None:
    core = make_core(**swapping_settings("eagle3", tmp_path))
    core.drafters.begin_load("noisy").result()

    def fail(stage: str) -> None:
        if stage == "exchange":
            raise OSError("a failure that a test asked for")

    core.runner.set_stage_hook(fail)  # type: ignore[attr-defined]
    with pytest.raises(OSError, match="asked for"):
        core.exchange_drafter()
    core.runner.set_stage_hook(None)  # type: ignore[attr-defined]
    assert core.drafter_state().version == 1
    batch = jobs("mixed", 4)
    assert texts(run(core, batch)) == texts(reference(batch))
    assert core.exchange_drafter().version == 2
    assert texts(run(core, batch)) == texts(reference(batch))


@pytest.mark.full
def test_a_thousand_swaps_under_load(
    reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(**swapping_settings("eagle3", tmp_path))
    swap_at_every_step(core, monkeypatch)
    batch = jobs("mixed", 16)
    expected = texts(reference(batch))
    while core.drafter_state().num_swaps < 1000:
        assert texts(run(core, batch)) == expected
    assert core.stats().num_step_failures == core.stats().num_drafter_failures == 0


def test_whatever_a_reader_raises_is_a_refusal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    core = make_core(**swapping_settings("eagle3", tmp_path))
    monkeypatch.setattr(core.drafters, "_reader", lambda path, sha256: 1 / 0)
    with pytest.raises(RequestError, match="could not be read: ZeroDivisionError") as caught:
        core.drafters.begin_load("noisy").result()
    assert caught.value.code == "drafter_unreadable"
    assert core.drafter_state().version == 1


def test_one_load_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(**swapping_settings("eagle3", tmp_path))
    may_go_on = threading.Event()
    reader = core.drafters._reader
    assert reader is not None

    def slow(path: str, sha256: str | None) -> object:
        may_go_on.wait()
        return reader(path, sha256)

    monkeypatch.setattr(core.drafters, "_reader", slow)
    first = core.drafters.begin_load("noisy")
    for act in (lambda: core.drafters.begin_load("noisy"), core.exchange_drafter):
        with pytest.raises(RequestError, match="being loaded") as caught:
            act()
        assert caught.value.code == "drafter_busy"
    may_go_on.set()
    first.result()
    assert core.exchange_drafter().version == 2
