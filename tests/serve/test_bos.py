"""A server whose tokenizer adds a BOS, as Llama's and Mistral's: every prompt has exactly one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from tokenizers import processors

from tests.serve.conftest import RunningServer, run_fake_server
from tests.serve.fake_model import TEMPLATE, write_fake_model

BOS = "<|endoftext|>"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_fake_model(
        tmp_path_factory.mktemp("bos") / "fake",
        {"eos_token_id": [3, 5, 7], "repetition_penalty": 1.05},
    )
    file = str(folder / "tokenizer.json")
    backend = tokenizers.Tokenizer.from_file(file)
    backend.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", special_tokens=[(BOS, backend.token_to_id(BOS))]
    )
    backend.save(file)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config |= {"bos_token": BOS, "chat_template": "{{ bos_token }}" + TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.fixture(scope="module")
def bos_server(model: Path) -> Iterator[RunningServer]:
    with run_fake_server(model) as server:
        yield server


def last_prompt(server: RunningServer) -> list[int]:
    return list(server.engine.requests[-1].prompt_token_ids)


def test_prompts(bos_server: RunningServer) -> None:
    (bos,) = bos_server.ids(BOS)
    plain = bos_server.ids("one two")
    for prompt in ("one two", BOS + "one two"):
        answer = bos_server.complete(prompt=prompt, max_tokens=1, echo=True)
        assert last_prompt(bos_server) == [bos, *plain]
        assert answer["choices"][0]["text"].startswith(prompt)
        assert answer["usage"]["prompt_tokens"] == len(plain) + 1
    bos_server.complete(prompt="one two", add_special_tokens=False, max_tokens=1)
    assert last_prompt(bos_server) == plain
    for ids in (plain, [bos, bos, *plain]):
        bos_server.complete(prompt=ids, max_tokens=1)
        assert last_prompt(bos_server) == ids


def test_log_probabilities_of_a_prompt_count_the_bos(bos_server: RunningServer) -> None:
    answer = bos_server.complete(prompt="one two", max_tokens=1, echo=True, logprobs=0)
    logprobs = answer["choices"][0]["logprobs"]
    tokens = [BOS, *(bos_server.context.tokenizer.token_text(i) for i in bos_server.ids("one two"))]
    assert logprobs["tokens"][:-1] == tokens
    assert logprobs["token_logprobs"][0] is None
    assert logprobs["text_offset"][:2] == [0, len(BOS)]
    answer = bos_server.complete(prompt="one two", max_tokens=1, prompt_logprobs=0)
    assert len(answer["choices"][0]["prompt_logprobs"]) == len(tokens)


@pytest.mark.parametrize("writes_bos", [True, False])
def test_chats(bos_server: RunningServer, model: Path, tmp_path: Path, writes_bos: bool) -> None:
    template = tmp_path / "without.jinja"
    template.write_text(TEMPLATE)
    with run_fake_server(model, chat_template=str(template)) as other:
        server = bos_server if writes_bos else other
        server.chat(max_tokens=1)
        ids = last_prompt(server)
        assert ids[0] == server.ids(BOS)[0] and ids.count(ids[0]) == 1
        messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "one"}]
        server.chat(messages=messages, continue_final_message=True, max_tokens=1)
        assert last_prompt(server).count(ids[0]) == 1
        body = {"messages": [{"role": "user", "content": "hi"}]}
        assert server.client.post("/tokenize", json=body).json()["tokens"] == ids
        tokens = server.client.post("/tokenize", json={"prompt": "hi"}).json()["tokens"]
        assert tokens == [ids[0], *server.ids("hi")]
        assert server.client.get("/tokenizer_info").json()["add_bos_token"] is True


def test_several_ends_and_the_models_own_penalty(bos_server: RunningServer) -> None:
    assert {3, 5, 7} <= set(bos_server.context.model.eos_token_ids)
    bos_server.complete(prompt="x", max_tokens=1)
    assert bos_server.engine.requests[-1].sampling.repetition_penalty == 1.05
    bos_server.complete(prompt="x", max_tokens=1, repetition_penalty=1.0)
    assert bos_server.engine.requests[-1].sampling.repetition_penalty == 1.0


def test_without_a_template_a_chat_names_the_remedy(model: Path, tmp_path: Path) -> None:
    base = write_fake_model(tmp_path / "base")
    config = json.loads((base / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (base / "tokenizer_config.json").write_text(json.dumps(config))
    with run_fake_server(base) as server:
        error = server.error("/v1/chat/completions", messages=[{"role": "user", "content": "hi"}])
        assert "--chat-template" in error["message"]
        assert server.complete(prompt="one", max_tokens=1)["usage"]["completion_tokens"] == 1
