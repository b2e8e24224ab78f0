"""One turn of adapting a head: the decision, the vocabulary, the swap, the watch, and the whole."""

from __future__ import annotations

import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from openspec import LLM, SamplingParams
from openspec.adapt.__main__ import main
from openspec.adapt.cycle import run, server, watch
from openspec.adapt.cycle.vocabulary import chosen, coverage, shares, with_vocabulary
from openspec.adapt.decide import Measured, class_of, decide, interval, measured
from openspec.adapt.heads import kind_named
from openspec.adapt.heads.parts import VocabularyHead
from openspec.adapt.scoring import Price, Tally
from openspec.adapt.texts import Text
from openspec.errors import ConfigError
from openspec.messages import SpecCounters
from tests.golden import trainable

QUESTIONS = [f"Tom has {n} apples and buys {n + 2} more. How many has he?" for n in range(40)]
SMALL = "--num-threads 1 --max-model-len 160 --max-num-seqs 8 --text-length 128".split()
RUN = [*SMALL, *"--batch-rows 1 --answer-tokens 48 --answer-share 0 --minutes 0.2".split()]


def of(lengths: list[float], milliseconds: float = 1.0, **more: Any) -> Measured:
    tallies = [Tally(100, round(100 * length) - 1) for length in lengths]
    return dataclasses.replace(Measured(tallies, [], {}, Price(milliseconds)), **more)


def test_a_ratio_is_drawn_in_pairs() -> None:
    one = [Tally(10, 19), Tally(10, 29), Tally(10, 39), Tally(10, 9)]
    other = [Tally(10, 39), Tally(10, 59), Tally(10, 79), Tally(10, 19)]
    alike = (Price(1.0), Price(1.0))
    # Twice the tokens of every prompt, at the same price: no draw says anything else.
    assert interval(one, other, alike) == pytest.approx((2.0, 2.0, 2.0))
    dear = (Price(1.0), Price(2.0))
    assert interval(one, one, dear) == pytest.approx((0.5, 0.5, 0.5))
    # Half the steps gain less where prompts take as long as they did.
    half, waits = [Tally(5, tokens) for _, tokens, _ in one], (Price(1.0, 10.0), Price(1.0, 10.0))
    assert interval(one, half, waits) == pytest.approx((4 / 3, 4 / 3, 4 / 3))
    low, middle, high = interval(one, [Tally(10, 29)] * 4, alike)
    assert middle == pytest.approx(1.2) and low < middle < high


@pytest.mark.parametrize(
    ("other", "takes_it", "says"),
    [
        (of([2.2] * 20), True, "1.100x as fast .*: take it"),
        (of([2.0] * 20), False, "keep the first"),
        (of([2.1] * 20, 1.1), False, "0.955x as fast"),  # longer, but its steps take longer
        (of([1.0, 3.5] * 10), False, "no verdict"),
        (of([2.2] * 20, base=[Tally(10, 28)]), False, "base texts are 0.967x"),
        (of([2.2] * 20, base=[Tally(100, 291)]), True, "take it"),
        (of([2.2] * 20, classes={"greedy": [Tally(100, 189)]}), False, "greedy is 0.950x"),
        (of([2.2] * 20, classes={"greedy": [Tally(100, 196)]}), True, "take it"),
    ],
)
def test_what_is_decided(other: Measured, takes_it: bool, says: str) -> None:
    first = of([2.0] * 20, classes={"greedy": [Tally(100, 199)]}, base=[Tally(10, 29)])
    if not other.base:
        first = dataclasses.replace(first, base=[])
    if not other.classes:
        first = dataclasses.replace(first, classes={})
    found = decide(first, other)
    assert found.takes_it == takes_it
    assert re.search(says, found.why)
    assert not decide(first, other, is_finite=False).takes_it


def test_a_class_of_few_tokens_decides_nothing() -> None:
    first = of([2.0] * 20, classes={"greedy": [Tally(10, 20)]})
    assert decide(first, of([2.2] * 20, classes={"greedy": [Tally(10, 10)]})).takes_it


def test_texts_of_one_prompt_count_as_one() -> None:
    texts = [Text([1, 2, 3], 2), Text([1, 2, 4], 2, 0.7), Text([1, 3, 4], 2, 0.9)]
    found = measured(list(zip(texts, [Tally(1, 2)] * 3, strict=True)), [], Price(1.0))
    assert found.traffic == [Tally(2, 4, 2), Tally(1, 2)]
    assert found.classes.keys() == {"greedy", "T <= 0.7", "T > 0.7"}
    assert class_of(Text([0] * 1030, 1025)) == "greedy, long prompts"


def test_a_vocabulary_for_a_mixture_of_texts() -> None:
    traffic = shares([Text([0, *[7] * 6, *[8] * 3, 9], 1)], 40)
    base = shares([Text([0, *[1] * 5, *[2] * 5], 1)], 40)
    vocabulary = torch.arange(20)
    found = chosen(vocabulary, traffic, base, 2)
    assert torch.equal(found, vocabulary)  # all of them are there
    traffic = shares([Text([0, *[30] * 6, *[31] * 3, *[32]], 1)], 40)
    found = chosen(vocabulary, traffic, base, 2)
    assert len(found) == 20 and bool((found.diff() > 0).all())
    assert {30, 31, 1, 2} <= set(found.tolist()) and 32 not in found  # a tenth of the rows
    assert coverage(vocabulary, traffic) == 0 and coverage(found, traffic) == pytest.approx(0.9)
    assert torch.equal(chosen(torch.arange(40), traffic, base, 2), torch.arange(40))


def test_rows_of_new_tokens_are_like_what_was_learned() -> None:
    """Tokens that are taken out and put in again come back nearer than any other's."""
    head = trainable.shipped("eagle3")
    assert isinstance(head, VocabularyHead)
    old = head.vocabulary
    plan = trainable.plan(vocabulary=old)
    absent = torch.ones(len(trainable.ends().head), dtype=torch.bool)
    absent[old] = False
    less = torch.cat((old[::20], absent.nonzero()[: len(old) - len(old[::20]), 0])).sort().values
    kind = kind_named("eagle3")
    other = with_vocabulary(head, kind, plan, less, trainable.ends())
    assert torch.equal(other.vocabulary, less)
    kept = torch.isin(less, old)
    rows = head.lm_head.weight[torch.isin(old, less)]
    assert torch.equal(other.lm_head.weight[kept], rows)
    back = with_vocabulary(
        other, kind, dataclasses.replace(plan, vocabulary=less), old, trainable.ends()
    )
    likeness = torch.cosine_similarity(back.lm_head.weight, head.lm_head.weight, dim=-1)
    shuffled = torch.cosine_similarity(back.lm_head.weight.roll(1, 0), head.lm_head.weight, dim=-1)
    assert likeness.mean() > 0.3 + shuffled.mean()


def test_live_lengths_and_what_is_since() -> None:
    said = {"engines": [{"counters": {"num_drafts": 10, "num_accepted_tokens_per_pos": [8, 4],
            "num_drafts_per_pos": [10, 8]}}, {"counters": {"num_drafts": 10,
            "num_accepted_tokens_per_pos": [8], "num_drafts_per_pos": [10]}}]}  # fmt: skip
    total = server.counters_of(said)
    assert total.num_drafts == 20 and server.live_length(total, 8) == pytest.approx(1 + 0.8 + 0.5)
    assert server.live_length(total, 1) == pytest.approx(1.8)
    more = SpecCounters(
        num_drafts=30, num_accepted_tokens_per_pos=[16, 4, 1], num_drafts_per_pos=[30, 8, 2]
    )
    changed = server.since(total, more)
    assert (changed.num_drafts, changed.num_accepted_tokens_per_pos) == (10, [0, 0, 1])


class FakeServer(server.Server):
    """A server whose heads draft so far; each question comes 1,500 steps after the one before."""

    def __init__(self, folder: Path, *lengths: float) -> None:
        self.folder, self.lengths, self.version, self.asked = folder, lengths, 1, 0
        self.counted = [SpecCounters() for _ in lengths]
        for one in self.counted:
            one.num_accepted_tokens_per_pos, one.num_drafts_per_pos = [0], [0]

    def drafter(self) -> dict[str, Any]:
        counters = self.counted[self.version - 1]
        counters.num_drafts += 1500
        counters.num_drafts_per_pos[0] += 1500
        right = round(1500 * (self.lengths[self.version - 1] - 1))
        counters.num_accepted_tokens_per_pos[0] += right
        said = {name: getattr(counters, name) for name in counters.__struct_fields__}
        return {"version": self.version, "folder": str(self.folder), "counters": said}

    def load(self, path: str) -> dict[str, Any]:
        self.folder, self.version = Path(path), self.version + 1
        return self.drafter()

    def rollback(self) -> dict[str, Any]:
        self.version -= 1
        return self.drafter()


@pytest.mark.parametrize(
    ("lengths", "version", "says"),
    [((1.5, 1.6), 2, "version 2: 1.50 .* 1.60 since"), ((1.5, 1.4), 1, "rolled back to version 1")],
)
def test_a_swap_is_taken_back_if_drafts_come_less_far(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lengths: Any, version: int, says: str
) -> None:
    monkeypatch.setattr(run.time, "sleep", lambda _: None)
    fake = FakeServer(tmp_path, *lengths)
    fake.drafter()
    assert re.search(says, run.swap(fake, tmp_path / "new", 8, 60.0))
    assert fake.version == version
    quiet = FakeServer(tmp_path, 1.5, 1.6)
    assert "too few steps before" in run.swap(quiet, tmp_path / "new", 8, 60.0)


def test_a_drift_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / watch.EXPECTED).write_text(json.dumps({watch.DRAFTS: 4, watch.LENGTH: 1.6}))
    fake = FakeServer(tmp_path, 1.6)
    monkeypatch.setattr(watch.ServerConfig, "opened", lambda _: fake)
    questions = 0

    def sleep(_: float) -> None:
        nonlocal questions
        questions += 1
        if questions == 10:
            fake.lengths = (1.5,)

    assert watch.watch(watch.WatchConfig(num_alarms=1), sleep) == 1
    assert 10 <= questions <= 12
    assert "version 1: 1.5" in caplog.text and "1.60 when it was taken" in caplog.text
    fake.folder = tmp_path / "elsewhere"
    with pytest.raises(ConfigError, match=r"no expected\.json"):
        watch.watch(watch.WatchConfig(num_alarms=1), sleep)


def test_a_server_that_is_none() -> None:
    with pytest.raises(ConfigError, match="does not answer /v1/drafter"):
        server.Server("http://127.0.0.1:9", None).drafter()
    with pytest.raises(ConfigError, match="--server is needed"):
        watch.watch(watch.WatchConfig())


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"question": one}) for one in QUESTIONS))
    return path


def test_a_head_that_is_at_home_is_left_alone(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """A trial that changes nothing, on texts like the base's."""
    monkeypatch.setattr(run, "CHANGED", ())
    monkeypatch.setattr(run, "AT_HOME", 0.5)
    out = tmp_path / "head"
    more = ["--prompts", str(prompts), "--base", str(prompts), "--out", str(out)]
    assert main(["run", "--method", "eagle3", *more, *RUN, "--rate", "1e-12"]) == 0
    said = capsys.readouterr().out
    assert "do not bother: a trial brings +0.0 %" in said and "nothing is written" in said
    assert not out.exists()


def test_a_head_whose_vocabulary_is_anothers(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It gets the traffic's tokens back, in its own format, and changes no text."""
    with LLM(num_threads=1, max_model_len=160, stats_interval_s=0.0) as llm:
        asked = [[{"role": "user", "content": one}] for one in QUESTIONS[:2]]
        params = SamplingParams(temperature=0.0, max_tokens=48)
        expected = [one.outputs[0].token_ids for one in llm.chat(asked, params, use_tqdm=False)]
    written = torch.bincount(torch.tensor([i for one in expected for i in one]), minlength=4096)
    old, new = tmp_path / "old", tmp_path / "new"
    frequent = trainable.write_without(written.argsort(descending=True)[:30], old)
    more = ["--prompts", str(prompts), "--draft-model", str(old), "--out", str(new)]
    assert main(["run", "--method", "eagle3", *more, *RUN, "--max-steps", "2"]) == 0
    said = capsys.readouterr().out
    assert "rows of its vocabulary are new" in said and "take it" in said
    assert (old / "config.json").read_bytes() == (new / "config.json").read_bytes()
    before, after = (load_file(folder / "model.safetensors") for folder in (old, new))
    assert {k: (v.shape, v.dtype) for k, v in before.items()} == {
        k: (v.shape, v.dtype) for k, v in after.items()
    }
    ids = after["d2t"] + torch.arange(len(after["d2t"]))
    assert torch.isin(frequent, ids).float().mean() > 0.9
    assert torch.equal(after["t2d"].nonzero()[:, 0], ids)
    settings: dict[str, Any] = {"method": "eagle3", "draft_model": str(new)}
    with LLM(num_threads=1, max_model_len=160, stats_interval_s=0.0, **settings) as llm:
        outputs = llm.chat(asked, params, use_tqdm=False)
    assert [one.outputs[0].token_ids for one in outputs] == expected
    assert json.loads((new / watch.EXPECTED).read_text())[watch.LENGTH] > 1.0

    heads = f"--heads {old},{new} --prompts {prompts} --answer-tokens 48 --num-requests 2".split()
    assert main(["decide", "--method", "eagle3", *heads, *SMALL]) == 0
    first, second, verdict = capsys.readouterr().out.splitlines()
    lengths = [float(line.split(": ")[1].split()[0]) for line in (first, second)]
    assert lengths[0] < lengths[1] and verdict.endswith("take it")
    assert all("at 2 requests" in line for line in (first, second))


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--method", "ngram"], "has no heads to adapt"),
        (["--method", "dflash", "--head", "eagle3"], "that is for --method eagle3"),
        (["--method", "eagle3", "--acceptance", "rejection"], "texts differ by head"),
        (["--method", "eagle3", "--records", "r"], "or --records without any"),
        (["--method", "eagle3", "--out", "/"], "is there already; name a new folder"),
        (["--method", "eagle3", "--server", "http://127.0.0.1:9"], "does not answer /v1/drafter"),
    ],
)
def test_turns_that_cannot_begin(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    given = ["run", "--prompts", "p", "--out", str(tmp_path / "new"), *more]
    assert main(given) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()
