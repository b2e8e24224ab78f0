"""Training of draft heads: prompts, replay, scores, and a small training from end to end."""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from bench.random_target import PUBLISHED
from safetensors.torch import load_file, save_file

from openspec import LLM, SamplingParams
from openspec.adapt import loop, train
from openspec.adapt.__main__ import main
from openspec.adapt.cycle.compare import Judged
from openspec.adapt.heads import kind_named
from openspec.adapt.heads.parts import ReadText
from openspec.adapt.replay import Replay
from openspec.adapt.scoring import (
    Price,
    StepPrices,
    Tally,
    chain_hits,
    length_of,
    price,
    score,
    step_prices,
    walk,
)
from openspec.adapt.start import read_head, read_start
from openspec.adapt.target import answering_config
from openspec.adapt.texts import (
    Rows,
    SourceConfig,
    Text,
    Texts,
    batches,
    draft_vocabulary,
    gather,
    load_texts,
    own_prompts,
    packed,
    read_prompts,
    save_texts,
    split,
    unused_token,
)
from openspec.checkpoint.targets.config import ModelConfig
from openspec.config import config_from_settings
from openspec.engine.core.engine_core import EngineCore
from openspec.errors import ConfigError
from openspec.messages import EngineOutput, EngineRequest, SpecDecodeStats, add_counters
from openspec.records.recorder import Limits, Recorder
from openspec.records.shards import target_identity
from tests.gates import hybrid_target
from tests.golden import trainable

SMALL: dict[str, Any] = {
    "num_threads": 1,
    "max_model_len": 256,
    "max_num_batched_tokens": 64,
    "max_num_seqs": 4,
}
QUESTIONS = [f"Tom has {n} apples and buys {n + 2} more. How many has he?" for n in range(24)]
TRAIN = (
    "--num-threads 1 --max-model-len 256 --max-num-seqs 8 --text-length 192 --batch-rows 1 "
    "--answer-tokens 48 --answer-share 0 --minutes 30 --max-steps 4 --measure-every 2 "
    "--head-intermediate-size 64 --num-speculative-tokens 3"
).split()
EAGLE = ["--method", "eagle3", "--draft-vocab-size", "512"]
BLOCK = "--head-layers 2 --anchors 4 --method-option capture_layers=1,3".split()


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    config = answering_config(config_from_settings(SMALL))
    with LLM(**dataclasses.asdict(config)) as made:
        yield made


@pytest.fixture(scope="module")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    lines = [json.dumps({"question": question}) for question in QUESTIONS]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_every_form_of_a_prompt(llm: LLM, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    message = {"role": "user", "content": "Hi"}
    forms: list[dict[str, Any]] = [
        {"messages": [message]},
        {"turns": ["Hi", "And then?"]},
        {"question": "Hi", "answer": "5"},
        {"prompt": "<|im_start|>user\nHi"},
        {"prompt": [5, 6, 7]},
        {"prompt": "x " * 500},
    ]
    path.write_text("\n".join(map(json.dumps, forms)))
    found = read_prompts(path, llm, 100)
    chat = llm.tokenizer.render_chat([message]).token_ids
    assert found[:3] == [chat, chat, chat]
    assert found[3][0] == llm.tokenizer.special_tokens["<|im_start|>"]
    assert found[4:] == [[5, 6, 7]]  # and the last one is too long


@pytest.mark.parametrize(
    "line",
    ["", "{", "[]", "3", '{"text": "a"}', '{"prompt": [-1]}', '{"turns": []}', '{"prompt": 3}'],
)
def test_other_lines_are_refused_with_their_place(llm: LLM, tmp_path: Path, line: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n{{"prompt": "b"}}\n')
    with pytest.raises(ConfigError, match=r"prompts\.jsonl:2: .*prompt, messages, turns"):
        read_prompts(path, llm, 100)


def test_a_few_texts_of_each_kind(llm: LLM, prompts: Path) -> None:
    """What a trial reads: no more than it says, and no prompt on both sides."""
    own = SourceConfig(prompts=str(prompts), base=str(prompts), answer_tokens=4, text_length=192)
    found = gather(llm, own, 0.0, lambda *_: None, 1)
    assert (len(found.held_out), len(found.base_held_out)) == (1, 1)
    assert 0 < len(found.learned) <= 5
    apart = [text.tokens[: text.prompt] for text in found.held_out]
    assert not [text for text in found.learned if text.tokens[: text.prompt] in apart]
    assert len(gather(llm, own, 0.0, lambda *_: None).learned) > 5


def test_texts_are_no_longer_than_a_replay_takes(llm: LLM, tmp_path: Path) -> None:
    path, longest = tmp_path / "prompts.jsonl", SMALL["max_model_len"] - 1
    path.write_text("".join(json.dumps({"prompt": [40] * n}) + "\n" for n in (14, 15, 16)))
    own = SourceConfig(held_out=str(path), prompts=str(path), answer_tokens=longest - 15)
    texts = gather(llm, own, None, lambda *_: None).held_out
    assert [text.prompt for text in texts] == [14, 15]
    assert len(Replay(llm, [0]).texts([[40] * longest])[0]) == longest
    with pytest.raises(ValueError, match="leave no room"):
        Replay(llm, [0]).texts([[40] * (longest + 1)])


def test_the_model_asks_itself(llm: LLM) -> None:
    """Chats of one user turn each, none twice; the same seed asks the same."""
    found = own_prompts(llm, 24, 3)
    assert len(found) > 6 and len(set(map(tuple, found))) == len(found)
    assert own_prompts(llm, 24, 3) == found
    begin = llm.tokenizer.render_chat([{"role": "user", "content": "x"}]).token_ids[0]
    assert {prompt[0] for prompt in found} == {begin}


def test_equal_prompts_are_on_one_side() -> None:
    prompts = [[n, n + 1] for n in range(40)]
    learned, held_out = split(prompts * 2)
    assert len(held_out) == 2 and len(learned) == 76
    assert not [prompt for prompt in learned if prompt in held_out]
    assert split(prompts[::-1])[1] == held_out


def test_rows_hold_whole_texts_or_beginnings() -> None:
    texts = [Text(list(range(100 * n, 100 * n + 7 * n + 2)), n) for n in range(1, 9)]
    rows = packed(texts, 32, 0)
    num_generated = 0
    for tokens, places, generated in zip(*rows, strict=True):
        for begin in (places == 0).nonzero()[:, 0].tolist():
            text = next((t for t in texts if t.tokens[0] == tokens[begin]), None)
            if text is None:
                assert tokens[begin] == 0 and not generated[begin]  # nothing stands there
                continue
            size = int((tokens[begin:] >= 100).long().cumprod(0).sum())
            size = min(size, len(text.tokens))
            assert tokens[begin : begin + size].tolist() == text.tokens[:size]
            assert places[begin : begin + size].tolist() == list(range(size))
            expected = [place >= text.prompt for place in range(size)]
            assert generated[begin : begin + size].tolist() == expected
            num_generated += sum(expected)
    assert int(rows.generated.sum()) == num_generated


def test_batches_go_on_where_they_ended() -> None:
    texts = [Text(list(range(10 * n, 10 * n + 9)), 1) for n in range(1, 9)]
    first = batches(texts, 16, 3, 0)
    every = [next(first) for _ in range(7)]
    later = batches(texts, 16, 3, 4)
    for expected in every[4:]:
        found: Rows = next(later)
        assert torch.equal(found.tokens, expected.tokens)


def test_the_vocabulary_is_what_was_generated_most() -> None:
    texts = [Text([9, 9, 9, 1, 2, 2], 3), Text([9, 2, 3], 1)]
    assert draft_vocabulary(texts, [7], 12, 3).tolist() == [1, 2, 7]
    assert unused_token(texts, 10, 12, [7]) == 10
    assert unused_token(texts, 12, 12, [3, 7, 9]) == 7
    with pytest.raises(ConfigError, match="--mask-token"):
        unused_token(texts, 12, 12, [3, 9])


def test_texts_in_a_file(tmp_path: Path) -> None:
    texts = Texts([Text([1, 2, 3], 2, 0.7)], [Text([4, 5], 1)], [Text([6, 7, 8, 9], 3)], [])
    save_texts(tmp_path / "texts", texts)
    assert load_texts(tmp_path / "texts") == texts
    assert texts.learned == [*texts.traffic, *texts.base]


def test_a_replay_has_the_states_of_a_decoding_step(llm: LLM) -> None:
    """Bit for bit, whatever is replayed beside a text and however it is cut into steps."""
    layers = (0, 2, 3)
    output = llm.generate([[5, 6, 7, 8, 9] * 8], SamplingParams(temperature=0, max_tokens=100))[0]
    text = [*output.prompt_token_ids, *output.outputs[0].token_ids]
    replay = Replay(llm, layers)
    alone = replay.texts([text])[0]
    assert alone.shape == (len(text), 3 * 320)
    others = [[7] * length for length in (70, 1, 30, 2, 5, 90)]
    together = replay.texts([*others[:3], text, *others[3:]])
    assert [len(states) for states in together] == [70, 1, 30, len(text), 2, 5, 90]
    assert torch.equal(together[3], alone)
    expected = trainable.captured(text, layers)
    torch.testing.assert_close(alone, expected, rtol=1e-3, atol=1e-3)
    runner = llm.engine.runner
    one_by_one = []
    from openspec import _C

    params = _C.SequenceParams(SamplingParams(temperature=0.0), max_tokens=8)
    slot = runner.add_sequence(text[:3], 3, params)  # type: ignore[attr-defined]
    for count in (1, 2):
        lease = runner.reserve([(slot, count, 0)])
        lease.launch()
        lease.collect()
        one_by_one.append(torch.from_numpy(runner.captured()))  # type: ignore[attr-defined]
        lease.commit()
    runner.remove_sequence(slot)
    assert torch.equal(torch.cat(one_by_one), alone[:3])

    rows = packed([Text(text, 40), Text(others[0], 3), Text(others[2], 3)], 192, 0)
    by_row = replay.rows(rows)
    at = (rows.places == 0).nonzero().tolist()
    for row, begin in at:
        if rows.tokens[row, begin] == 5:
            size = min(len(text), 192 - begin)
            assert torch.equal(by_row[row, begin : begin + size], alone[:size])


@pytest.mark.parametrize(("method", "count"), [("eagle3", 6), ("dflash", 5)])
def test_a_score_is_what_the_engine_counts(method: str, count: int) -> None:
    """Greedy chains at every step: the engine's own tokens for each step."""
    settings = {**SMALL, "max_num_seqs": 1, "max_model_len": 512, "max_num_batched_tokens": 512}
    settings |= {"method": method, "num_speculative_tokens": count, "adaptive_speculation": False}
    with LLM(**settings, stats_interval_s=0.0, enable_prefix_caching=False) as llm:
        asked = [[{"role": "user", "content": text}] for text in QUESTIONS[:2]]
        outputs = llm.chat(asked, SamplingParams(temperature=0.0, max_tokens=40), use_tqdm=False)
    total = SpecDecodeStats()
    counters = tuple(one.metrics.spec_decode or SpecDecodeStats() for one in outputs)
    add_counters(total, counters)
    head = trainable.shipped(method)
    texts = []
    for output in outputs:
        tokens = [*output.prompt_token_ids, *output.outputs[0].token_ids]
        captured = trainable.captured(tokens, head.capture_layers)
        texts.append(ReadText(torch.tensor(tokens), len(output.prompt_token_ids), captured))
    drafts = [head.drafts(text, trainable.ends(), count) for text in texts]
    hits = [chain_hits(text, one) for text, one in zip(texts, drafts, strict=True)]
    num_drafts = num_accepted = 0
    for one in hits:
        at = 0
        while (room := len(one) - 1 - at) > 0:
            num_drafts += room > 1  # nothing is drafted where one token is left
            num_accepted += min(one[at], room - 1)
            at += one[at] + 1
    assert (num_drafts, num_accepted) == (total.num_drafts, total.num_accepted_tokens)
    config = config_from_settings({"method": method}).with_folders()
    spec = read_head(config, llm.model_config).model.head
    answers = tuple(tuple(one.outputs[0].token_ids) for one in outputs)
    judged = Judged("", counters, answers, spec, StepPrices(Price(1.0), Price(2.0)))
    assert judged.measured.traffic == list(map(walk, hits))
    found = score(head, trainable.ends(), texts, [1, count])
    assert found[count] == length_of(map(walk, hits))
    assert found[1] < found[count]


def test_what_is_counted() -> None:
    text = ReadText(torch.tensor([9, 1, 2, 3, 4]), 1, torch.zeros(5, 1))
    drafts = torch.tensor([[2, 3, 4], [3, 9, 9], [9, 9, 9], [5, 6, 7]])
    hits = chain_hits(text, drafts)
    assert hits == [3, 1, 0, 0]
    assert walk(hits) == (1, 3, 1) and walk([0, 1, 0, 0]) == (2, 3, 1)
    assert length_of(map(walk, [hits, [0, 1, 0, 0]])) == 2.0


class TimedCore:
    """An engine whose time is counted: 10 ms a step, 1 ms a token of a prompt."""

    def __init__(self, number: int, most_begun: int, paces: Iterable[float]) -> None:
        self.info = SimpleNamespace(max_model_len=400, page_size=16, num_pages=2000)
        self.now, self.pace, self._paces = 0.0, 1.0, iter(paces)
        self._number, self._most_begun = number, most_begun
        self.asked = dict[str, EngineRequest]()
        self._waiting, self._running = list[str](), dict[str, int]()

    def add_request(self, request: EngineRequest) -> None:
        if request.request_id == "timed 0":
            self.pace = next(self._paces)
        self.asked[request.request_id] = request
        self._waiting.append(request.request_id)

    def abort(self, name: str) -> None:
        self._waiting = [one for one in self._waiting if one != name]
        self._running.pop(name, None)

    @property
    def has_work(self) -> bool:
        return bool(self._running or self._waiting)

    def step(self) -> list[EngineOutput]:
        for _ in range(self._most_begun):
            if self._waiting and len(self._running) < self._number:
                self._running[self._waiting.pop(0)] = 0
        self.now += 0.010 * self.pace
        outputs = [EngineOutput(request_id=name) for name in self._running]
        for name in list(self._running):
            length = len(self.asked[name].prompt_token_ids)
            self.now += 0.0 if self._running[name] else 0.001 * length
            self._running[name] += 1
            room = self.info.max_model_len - length
            if self._running[name] == min(room, self.asked[name].sampling.max_tokens):
                del self._running[name]
        return outputs


@pytest.mark.parametrize("number", [1, 4])
def test_what_steps_and_prompts_cost(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """By turns, so that a prompt's step is known from the others; and what is predicted of it."""
    core = TimedCore(number, number, [1.0, 1.5, 0.5, *[1.0] * 3])
    monkeypatch.setattr(time, "perf_counter", lambda: core.now)
    texts = [Text([7] * (length + 100), length) for length in (90, 24, 28, 20, 22, 26, 18, 12)]
    found = price(cast(EngineCore, core), texts, number, drafts=True)
    assert len(core.asked) == number + 6 and not core.has_work
    assert all(one.speculative.enabled for one in core.asked.values())
    assert found.step == pytest.approx(10 / number)
    # The first ones begin wherever answers are, the others at the beginning, of the mean length.
    lengths = [len(one.prompt_token_ids) for one in core.asked.values()]
    assert lengths[number:] == [28, 26, 24, 22, 20, 18]
    assert lengths[:number] == ([12] if number == 1 else [12, 90 + 25, 28 + 50, 26 + 75])
    assert found.request == pytest.approx(10 / number + 23)
    # Of eight tokens one comes with the prompt: at one request it and seven steps.
    by_hand = 1000 * 8 / (7 * 10 / number + found.request)
    assert found.speed([Tally(7, 7)] * 3) == pytest.approx(by_hand)
    with pytest.raises(ConfigError, match=r"answers end before all have begun; .*raise --max-"):
        core.info.max_model_len = 31
        price(cast(EngineCore, core), [Text([7] * 31, 30)], number, drafts=True)
    with pytest.raises(ConfigError, match=f"--num-requests {number}: .* KV pages .* 1 are there"):
        core.info.num_pages = 1
        price(cast(EngineCore, core), texts, number, drafts=True)


def test_prompts_that_take_many_steps_to_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """All go on before the first one ends, although one begins at a time."""
    core = TimedCore(64, 1, [1.0] * 3)
    monkeypatch.setattr(time, "perf_counter", lambda: core.now)
    found = price(cast(EngineCore, core), [Text([7] * 60, 20)], 64, drafts=False)
    assert found.step == pytest.approx(10 / 64)
    assert len(core.asked) == 64 + 6


def test_steps_with_drafts_cost_more() -> None:
    config = config_from_settings(
        {"method": "eagle3", "num_threads": 1, "max_model_len": 200}
    ).with_folders()
    texts = [Text(list(range(60)), 20), Text(list(range(80)), 40)]
    of_one, of_four = (
        step_prices(config, trainable.TINY / "eagle3", 3, texts, number) for number in (1, 4)
    )
    for found in (of_one, of_four):
        assert 0 < found.plain.step < found.drafted.step < 50 * found.plain.step
        assert found.drafted.request > found.plain.step
    assert of_one.plain.at == "one request" and of_four.plain.at == "4 requests"


def trained(prompts: Path, out: Path, *more: str) -> dict[str, Any]:
    assert main(["train", "--prompts", str(prompts), "--out", str(out), *TRAIN, *more]) == 0
    report: dict[str, Any] = json.loads((out / train.TRAINING / "report.json").read_text())
    return report


def test_a_head_from_prompts_alone(prompts: Path, tmp_path: Path) -> None:
    """It learns, loads in the engine, and changes no text."""
    report = trained(prompts, tmp_path / "head", *EAGLE, "--rate", "0.003")
    losses = [point["loss"] for point in report["curve"][1:]]
    assert report["curve"][-1]["step"] == 4 and losses[-1] < losses[0]
    assert report["held_out_texts"] == 1 and report["plain tokens/s"] > 0
    asked = [[{"role": "user", "content": text}] for text in QUESTIONS[:2]]
    params = SamplingParams(temperature=0.0, max_tokens=32)
    texts = []
    for settings in (
        {"method": "none"},
        {"method": "eagle3", "draft_model": str(tmp_path / "head")},
    ):
        with LLM(**SMALL, **settings, stats_interval_s=0.0, adaptive_speculation=False) as llm:
            outputs = llm.chat(asked, params, use_tqdm=False)
            texts.append([output.outputs[0].token_ids for output in outputs])
    assert texts[0] == texts[1]


def test_a_head_that_learned_already_keeps_its_format(prompts: Path, tmp_path: Path) -> None:
    """Unlearned, it is the same file; what is measured first is what it was."""
    shipped = trainable.TINY / "eagle3"
    more = ["--method", "eagle3", "--draft-model", str(shipped), "--rate", "1e-12"]
    report = trained(prompts, tmp_path / "head", *more, "--base", str(prompts), "--max-steps", "1")
    assert report["first"]["length at 3"] == report["best"]["length at 3"] > 2.0
    folders = (tmp_path / "head", shipped)
    configs = [(folder / "config.json").read_bytes() for folder in folders]
    assert configs[0] == configs[1]
    found, expected = (load_file(folder / "model.safetensors") for folder in folders)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name


@pytest.mark.parametrize(
    ("keys", "tensor", "message"),
    [
        ({"norm_before_residual": True}, None, "heads with norm_before_residual"),
        ({"norm_output": True}, None, "heads with norm_output"),
        ({"rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0}}, None, "RoPE"),
        ({}, "embed_tokens.weight", "embed_tokens.weight of .*: heads with it"),
    ],
)
def test_heads_of_other_kinds_are_refused(
    tmp_path: Path, keys: dict[str, Any], tensor: str | None, message: str
) -> None:
    config, tensors = trainable.load(trainable.TINY / "eagle3")
    (tmp_path / "config.json").write_text(json.dumps(config | keys))
    if tensor is not None:
        tensors[tensor] = torch.zeros(trainable.VOCABULARY, trainable.HIDDEN, dtype=torch.bfloat16)
    save_file(tensors, tmp_path / "model.safetensors")
    settings = config_from_settings({"method": "eagle3", "draft_model": str(tmp_path)})
    target = ModelConfig.from_folder(settings.model_path)
    start = read_start(settings, target)
    assert start is not None
    with pytest.raises(ConfigError, match=message):
        head = kind_named("eagle3").make(start.plan(target, 1024, 4))
        start.load(head)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more",
    [
        ["--method", "peagle", "--draft-vocab-size", "512"],
        ["--method", "dflash", *BLOCK],
        ["--method", "dflash", "--head", "dflash2", *BLOCK],
        ["--method", "dspark", *BLOCK],
    ],
    ids=lambda more: more[-1] if "--head" not in more else "selector",
)
def test_every_kind_of_head(prompts: Path, tmp_path: Path, more: list[str]) -> None:
    report = trained(prompts, tmp_path / "head", *more, "--max-steps", "2")
    assert report["curve"][-1]["step"] == 2


def test_a_training_goes_on_where_it_was_interrupted(
    prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the numbers that it would have had."""
    trained(prompts, tmp_path / "whole", *EAGLE)
    monkeypatch.setattr(loop, "CHECKPOINT_S", 0.0)
    step, num_steps = loop.Trainer._step, 0

    def interrupted(*arguments: Any) -> torch.Tensor:
        nonlocal num_steps
        num_steps += 1
        if num_steps == 3:
            raise KeyboardInterrupt
        return step(*arguments)

    monkeypatch.setattr(loop.Trainer, "_step", interrupted)
    again = ["train", "--prompts", str(prompts), "--out", str(tmp_path / "parts"), *TRAIN, *EAGLE]
    assert main(again) == 130
    assert main(again) == 2  # without --resume
    assert main([*again, "--resume", "--draft-vocab-size", "256"]) == 2  # another head
    report = trained(prompts, tmp_path / "parts", *EAGLE, "--resume")
    assert report["curve"][-1]["step"] == 4
    weights = [
        load_file(tmp_path / name / train.TRAINING / loop.STATE) for name in ("whole", "parts")
    ]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert torch.equal(tensor, weights[1][name]), name


def test_heads_are_compared_prompt_by_prompt(
    prompts: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The shipped head against itself without its first places' weights."""
    worse = tmp_path / "worse"
    worse.mkdir()
    config, tensors = trainable.load(trainable.TINY / "eagle3")
    tensors["fc.weight"] = torch.zeros_like(tensors["fc.weight"])
    (worse / "config.json").write_text(json.dumps(config))
    save_file(tensors, worse / "model.safetensors")
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(prompts.read_text().splitlines()[:4]))
    heads = f"{trainable.TINY / 'eagle3'},{worse},{trainable.TINY / 'eagle3'}"
    settings = f"--method eagle3 --heads {heads} --prompts {few} --answer-tokens 24".split()
    more = "--num-threads 1 --max-num-seqs 4 --max-model-len 256".split()
    assert main(["score", *settings, *more]) == 0
    first, second, third, against, same = capsys.readouterr().out.splitlines()
    lengths = [float(line.split(": ")[1].split()[0]) for line in (first, second, third)]
    assert lengths[0] == lengths[2] > 1.5 > lengths[1]
    assert against.endswith("keep the first") and float(against.split(" is ")[1].split("x")[0]) < 1
    assert "is 1.000x as fast (1.000 to 1.000" in same and same.endswith("keep the first")


def test_a_head_from_a_servers_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Texts of one prompt are on one side; nobody else's records are taken; then they go."""
    folder, identity = tmp_path / "records", target_identity(trainable.TINY)
    recorder = Recorder(
        folder, identity, Limits(share=1.0, max_rate=1e9, max_bytes=1 << 20, ttl_s=3600.0)
    )
    for number in range(12):
        for answer in ([7, 8, 9, 10] * 8, [11, 12, 13, 14] * 8):
            recorder.offer([5, 6, number, *answer], 3, 0.0)
    recorder.offer([1, 2, 3], 3, 0.0)  # nothing was answered
    recorder.close()
    more = [*EAGLE, "--records", str(folder), "--out", str(tmp_path / "head"), "--max-steps", "1"]
    assert main(["train", *TRAIN, *more]) == 0
    report = json.loads((tmp_path / "head" / train.TRAINING / "report.json").read_text())
    assert (report["texts"], report["held_out_texts"]) == (22, 2)
    assert report["generated_tokens"] == 22 * 32
    capsys.readouterr()
    (folder / "manifest.json").write_text(json.dumps({"format": 1, "target": "other"}))
    assert main(["train", *TRAIN, *more[:-4], "--out", str(tmp_path / "other")]) == 2
    assert "another model" in capsys.readouterr().err
    assert main(["erase", "--records", str(folder)]) == 0
    assert "1 files removed" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"records": "x"}, "or --records without any of them"),
        ({"prompts": None, "records": "x", "own_prompts": 9}, "or --records without any of them"),
        ({"prompts": None, "records": "x", "held_out": "y"}, "--held-out is for prompts"),
        ({"prompts": None}, "--prompts is needed"),
        ({"out": None}, "--out is needed"),
        ({"out": "/proc/head"}, "--out /proc/head: .*another folder"),
        ({"method": "ngram"}, "heads that can be trained: dflash, dflash2, dspark, eagle3, peagle"),
        ({"head": "dflash2"}, "that is for --method dflash"),
        ({"head_layers": 2}, "--head-layers 2: a head of kind eagle3 has 1; drop it"),
        ({"method": "dflash", "head_layers": 3}, "--head-layers 3 for 4 layers: .*rising ids"),
        ({"quantization": "fp8"}, "not for quantised ones"),
        ({"tensor_parallel_size": 2}, "--tensor-parallel-size: .*one GPU"),
        ({"load_format": "dummy"}, "--load-format dummy: a head needs a target with weights"),
        ({"config": PUBLISHED["qwen3-30b-a3b"]}, "mixtures of experts cannot be trained yet"),
        ({"config": hybrid_target.CONFIG}, r"running state \(hybrids\) cannot be trained yet"),
    ],
)
def test_what_is_refused(tmp_path: Path, settings: dict[str, Any], message: str) -> None:
    if "config" in settings:
        folder = tmp_path / "model"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(settings.pop("config")))
        settings["model"] = str(folder)
    names = ("prompts", "records", "held_out", "own_prompts", "out", "head", "head_layers")
    own = {name: settings.pop(name) for name in names if name in settings}
    config = config_from_settings({"method": "eagle3", **settings})
    given = {"prompts": "p.jsonl", "out": str(tmp_path / "out"), **own}
    with pytest.raises(ConfigError, match=message):
        train.Training(config, train.TrainConfig(**given))
    assert not (tmp_path / "out").exists()
