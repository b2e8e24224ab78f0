"""The doctor's report, over made-up acceptance, and once over a real engine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from openspec.checkpoint.weights import DraftModel
from openspec.config import EngineConfig
from openspec.drafters import register_drafter, unregister_drafter
from openspec.drafters.spec import Checkup, DrafterOption, DrafterSpec, DraftSetup, Variant
from openspec.errors import RequestError
from openspec.messages import SpecDecodeStats, StepCounts, record_step
from openspec.specs.head import HeadSpec
from openspec.tools import doctor, machine
from openspec.tools.doctor import Sample, examine
from tests.heads.stubs import tensor, write_draft, write_target

CHECKUP = Checkup(
    usual=(0.6, 0.4),
    source="a paper",
    least_first=0.3,
    variants=(
        Variant(label="reading lower", options={"level": 0}, advice="use --level 0"),
        Variant(label="reading higher", options={"level": 2}, advice="use --level 2"),
    ),
    causes=("it was trained for something else",),
)


HEAD = HeadSpec(
    layers=(),
    rms_norm_eps=1e-6,
    capture_layers=(),
    draft_vocab_size=8,
    has_embedding=False,
    has_token_map=False,
)


@pytest.fixture
def config(tmp_path: Path) -> Iterator[EngineConfig]:
    write_target(tmp_path / "target")
    folder = write_draft(tmp_path / "draft", {}, {"fc": tensor("BF16", [2])})

    def read(setup: DraftSetup) -> DraftModel:
        return DraftModel(
            folder=folder,
            description="a guesser",
            head=HEAD,
            tensor_names={},
            ignored_tensors={"verifier": "only training needs it"},
            details=("format: of its own", "layers: outputs of 1 = entering 2"),
        )

    register_drafter(
        DrafterSpec(
            name="guess",
            summary="guesses",
            default_num_speculative_tokens=2,
            max_num_speculative_tokens=2,
            options=(DrafterOption(name="level", default=1, help="What it reads."),),
            read_draft_model=read,
            plan_checkup=lambda setup: CHECKUP,
        )
    )
    yield EngineConfig(model=str(tmp_path / "target"), method="guess", draft_model=str(folder))
    unregister_drafter("guess")


def accepting(percent: dict[int, int], num_failures: int = 0) -> Callable[[EngineConfig], Sample]:
    """A drafter whose first draft is accepted that often, by level."""

    def measure(config: EngineConfig) -> Sample:
        assert not config.adaptive_speculation
        sample = Sample(num_failures=num_failures)
        for counters in (sample.chat, sample.completion):
            for i in range(50):
                level = int(config.method_options.get("level", 1))
                num_accepted = 1 if 2 * i < percent[level] else 0
                record_step(counters, StepCounts(num_accepted + 1, 2, num_accepted, 2))
        return sample

    return measure


def report(config: EngineConfig, measure: Callable[[EngineConfig], Sample]) -> tuple[str, bool]:
    lines = list(examine(config, measure))
    return "\n".join(lines), any(line.startswith("PROBLEM") for line in lines)


def test_healthy(config: EngineConfig) -> None:
    text, has_problem = report(config, accepting({0: 60, 1: 70, 2: 72}))
    assert not has_problem and "the drafter fits the model" in text
    assert "layers: outputs of 1 = entering 2" in text and "36 layers" in text
    assert "acceptance, chat: 70% 0% by position, mean length 1.70 (50 drafts)" in text
    assert "usual: 60%, 40% at positions 1 to 2 (a paper)" in text and "PROBLEM" not in text


def test_low_but_plausible(config: EngineConfig) -> None:
    text, has_problem = report(config, accepting({0: 30, 1: 40, 2: 42}))
    assert not has_problem
    assert "tried reading lower: 30%" in text and "tried reading higher: 42%" in text
    assert "the drafter works; 40% at position 1 is less than usual" in text


def test_what_so_few_drafts_cannot_tell_apart(config: EngineConfig) -> None:
    text, has_problem = report(config, accepting({0: 30, 1: 52, 2: 42}))
    assert not has_problem and "the drafter fits the model" in text


def test_neighbour_is_better(config: EngineConfig) -> None:
    text, has_problem = report(config, accepting({0: 14, 1: 20, 2: 68}))
    assert has_problem
    assert "reading higher: mean length of 1.68, the configuration 1.20: use --level 2" in text
    assert "trained for something else" not in text
    # Also where the configured one would pass.
    text, has_problem = report(config, accepting({0: 90, 1: 70, 2: 10}))
    assert has_problem and "use --level 0" in text
    assert "fits the model" not in text


def test_nothing_is_accepted(config: EngineConfig) -> None:
    text, has_problem = report(config, accepting({0: 0, 1: 0, 2: 2}))
    assert has_problem
    assert "PROBLEM: 0% at position 1, below the 30%" in text
    assert "  - it was trained for something else" in text
    text, _ = report(config, accepting({0: 0, 1: 0, 2: 20}))
    assert "use --level 2" in text and "  - it was trained for something else" in text


def test_nothing_to_judge(config: EngineConfig) -> None:
    text, has_problem = report(config, lambda config: Sample())
    assert has_problem and "only 0 drafts were made" in text
    text, has_problem = report(config, accepting(dict.fromkeys(range(3), 70), num_failures=3))
    assert has_problem and "the drafter failed in 3 steps" in text
    text, has_problem = report(EngineConfig(model=config.model, method="none"), accepting({}))
    assert not has_problem and "nothing is drafted" in text


BFLOATS = {"0": b"\0\0", "nan": b"\xc0\x7f", "inf": b"\x80\x7f", "-inf": b"\x80\xff"}
FLOATS = {"0": b"\0\0\0\0", "nan": b"\0\0\xc0\x7f", "inf": b"\0\0\x80\x7f"}


@pytest.mark.parametrize(
    ("dtype", "number"),
    [*(("BF16", BFLOATS[name]) for name in BFLOATS), *(("F32", FLOATS[name]) for name in FLOATS)],
)
def test_numbers_that_are_none(config: EngineConfig, dtype: str, number: bytes) -> None:
    assert config.draft_model_path is not None
    tensors = {
        "empty": tensor("BF16", [0]),
        "ids": tensor("I64", [1], 255),  # as a float it would be NaN
        "verifier": ("BF16", [1], BFLOATS["nan"]),  # is not loaded
        "fc": (dtype, [2], number + bytes(len(number))),
        "norm": (dtype, [1], number),
    }
    write_draft(config.draft_model_path, {}, tensors)
    text, has_problem = report(config, accepting(dict.fromkeys(range(3), 70)))
    is_broken = any(number)
    assert has_problem == is_broken
    expected = "PROBLEM: tensor fc holds NaN or infinite numbers (one of 2 that do)"
    assert (expected in text) == is_broken == ("acceptance, chat" not in text)


def test_command_line(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # The compiled core, which plans the memory, has no such method.
    monkeypatch.setattr(machine, "examine_machine", lambda config: iter(["GPUs: none"]))
    argv = ["--model", str(config.model), "--method", "guess"]
    draft = ["--draft-model", str(config.draft_model)]
    for percent, status in ((70, 0), (0, 1)):
        measure = accepting(dict.fromkeys(range(3), percent))
        monkeypatch.setattr(doctor, "measure", lambda config, num_tokens, m=measure: m(config))
        assert doctor.main([*argv, *draft]) == status
        assert "format: of its own" in capsys.readouterr().out
    assert doctor.main(argv) == 2
    assert "needs --draft-model" in capsys.readouterr().err
    assert doctor.main([*argv, *draft, "--doctor-tokens", "0"]) == 2

    def refuse(config: EngineConfig, num_tokens: int) -> Sample:
        raise RequestError("the prompt has 35 tokens")

    monkeypatch.setattr(doctor, "measure", refuse)
    assert doctor.main([*argv, *draft]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "error: the prompt has 35 tokens"


def test_sample_adds_up() -> None:
    chat, completion = SpecDecodeStats(), SpecDecodeStats()
    record_step(chat, StepCounts(3, 2, 2, 2))
    record_step(completion, StepCounts(1, 2, 0, 2))
    sample = Sample(chat, completion)
    assert (sample.total.num_drafts, sample.first) == (2, 0.5)
    assert Sample().first == 0.0


def test_the_other_feedback_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """The embedded model's head reads its outputs before the final norm."""
    assert doctor.main(["--method", "eagle3", "--method-option", "draft_feedback=normed"]) == 1
    shown = capsys.readouterr().out
    assert "use --method-option draft_feedback=raw" in shown
    assert "\n  python -m openspec.serve --method eagle3 --method-option draft_feedback=raw\n" in (
        shown
    )


@pytest.mark.parametrize(
    ("layers", "status"), [pytest.param("0,1,2", 0, marks=pytest.mark.full), ("1,2,3", 1)]
)
def test_layers_off_by_one_are_found(
    layers: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedded model's head reads the outputs of layers 0, 1 and 2."""
    option = f"--method-option=capture_layers={layers}"
    assert doctor.main(["--method", "eagle3", option]) == status
    shown = capsys.readouterr().out
    assert ("use --method-option capture_layers=0,1,2" in shown) == (status == 1)
    assert ("the drafter fits the model" in shown) == (status == 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "advice"),
    [
        pytest.param([], None, marks=pytest.mark.full),
        (["draft_anchor=first"], "use --method-option draft_anchor=drop"),
        pytest.param(
            ["draft_attention=causal"],
            "use --method-option draft_attention=full",
            marks=pytest.mark.full,
        ),
    ],
    ids=str,
)
def test_a_wrong_layout_is_found(
    options: list[str], advice: str | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """The embedded model's block head: the last token's row drafts nothing, rows see the block."""
    arguments = ["--method", "dflash", "--doctor-tokens", "48"]
    arguments += [f"--method-option={option}" for option in options]
    assert doctor.main(arguments) == (1 if advice else 0)
    shown = capsys.readouterr().out
    assert advice is None or advice in shown


@pytest.mark.slow
def test_a_layout_with_fewer_drafts_is_tried(capsys: pytest.CaptureFixture[str]) -> None:
    """The embedded head has 15 rows, which all draft; in the other layout it is one fewer."""
    flags = ["--num-speculative-tokens", "15", "--doctor-tokens", "48", "--copied-drafts"]
    assert doctor.main(["--method", "dspark", *flags]) == 0
    tried = capsys.readouterr().out.partition("tried anchor-drop blocks: ")[2]
    assert tried.partition(" by position")[0].count("%") == 14


def test_texts_that_are_too_long(capsys: pytest.CaptureFixture[str]) -> None:
    assert doctor.main(["--method", "ngram", "--max-model-len", "16"]) == 2
    assert "error: the prompt has" in capsys.readouterr().err


def test_on_a_real_engine(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--method-option", "ngram_min=1", "--doctor-tokens", "48", "--device", "cpu"]
    assert doctor.main(["--method", "ngram", *flags, "--tensor-parallel-size", "2"]) == 0
    shown = capsys.readouterr().out
    assert re.match("GPUs?.*\nmemory: each of 2 ranks has weights", shown, re.S)
    assert "\nexchange: not timed, the ranks are threads of the CPU\n" in shown
    assert "acceptance, chat: " in shown and "acceptance, completion: " in shown
    assert "names no acceptance that it should reach" in shown


def test_what_gpus_are_to_each_other() -> None:
    near, far, none = (True, 0), (True, 2), (False, 0)
    links = [[0, 18, 0], [18, 0, 0], [0, 0, 0]]
    peers = [[near, near, far], [near, near, none], [far, none, near]]
    assert list(machine.link_table(links, peers))[1:] == [
        "  GPU 0: .    NV18 P2",
        "  GPU 1: NV18 .    -",
        "  GPU 2: P2   -    .",
    ]
    assert not list(machine.link_table([[0]], [[near]]))
