from __future__ import annotations

import json
from pathlib import Path

import pytest

from openspec.bench.workloads import Workload, build_workload, load_dataset, workload_names
from openspec.errors import ConfigError


def build(name: str, count: int = 24, seed: int = 0) -> Workload:
    return build_workload(name, count, seed, vocab_size=500, input_len=40)


@pytest.mark.parametrize("name", workload_names())
def test_same_seed_same_prompts(name: str) -> None:
    assert build(name) == build(name)
    assert build(name, seed=1).prompts != build(name, seed=2).prompts
    assert build(name, 8).prompts == build(name, 24).prompts[:8]


@pytest.mark.parametrize("name", workload_names())
def test_prompts_are_distinct_and_filled_in(name: str) -> None:
    prompts = build(name, 64).prompts
    assert len({repr(prompt) for prompt in prompts}) >= 60
    for prompt in prompts:
        assert (prompt.user is None) != (prompt.token_ids is None)
        template = (prompt.user or "").split("```")[0].split('"""')[0]
        assert "{text}" not in template
        assert "{woman}" not in template


def test_random_ids_are_in_the_vocabulary() -> None:
    workload = build("random")
    assert workload.ignore_eos
    for prompt in workload.prompts:
        assert prompt.token_ids is not None
        assert len(prompt.token_ids) == 40
        assert max(prompt.token_ids) < 500


def test_repeat_contains_what_it_asks_for() -> None:
    for prompt in build("repeat", 40).prompts:
        assert prompt.user is not None
        assert len(prompt.user) > 150
        assert prompt.fields()["chat_template_kwargs"] == {"enable_thinking": False}


def test_unknown_workload() -> None:
    with pytest.raises(ConfigError, match="choose from"):
        build("sonnet")


def write(path: Path, *rows: object) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + "\n")
    return path


def test_dataset_forms(tmp_path: Path) -> None:
    path = write(
        tmp_path / "set.jsonl",
        {"prompt": "Once", "id": 7},
        {"prompt": [5, 6]},
        {"question_id": 1, "turns": ["first", "second"]},
        {"question": "How many?", "answer": "4"},
    )
    workload = load_dataset(path, 8, 0)
    assert workload.name == "set"
    assert len(workload.prompts) == 8
    assert {prompt.text for prompt in workload.prompts} == {"Once", None}
    assert {prompt.user for prompt in workload.prompts} == {"first", "How many?", None}
    assert [5, 6] in [prompt.token_ids for prompt in workload.prompts]
    assert load_dataset(path, 8, 0) == workload
    endpoints = {prompt.endpoint() for prompt in workload.prompts}
    assert endpoints == {"/v1/completions", "/v1/chat/completions"}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"prompt": 3}], "line 1"),
        ([{"prompt": "x"}, {"text": "y"}], "line 2.*needs"),
        ([], "no lines"),
    ],
)
def test_dataset_errors(tmp_path: Path, rows: list[object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_dataset(write(tmp_path / "set.jsonl", *rows), 1, 0)


def test_dataset_missing(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot read"):
        load_dataset(tmp_path / "nowhere.jsonl", 1, 0)
