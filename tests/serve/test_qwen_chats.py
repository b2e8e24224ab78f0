"""Chats as templates of Qwen3.5 and its successors have them: thinking opened in the prompt, with
degrees, kept or not; calls in XML."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.conftest import RunningServer, run_fake_server
from tests.serve.fake_model import write_fake_model
from tests.serve.sse import stream

PATH = "/v1/chat/completions"
HI = [{"role": "user", "content": "hi"}]
FIELDS = ("reasoning_content", "content")
IMAGE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,"}}
TEMPLATE = """\
{#- <tool_call><function= #}
{%- if reasoning_effort is defined %}
    {%- if reasoning_effort not in ['low', 'medium', 'xhigh'] %}
        {{- raise_exception('no such effort: ' + reasoning_effort) }}
    {%- endif %}
    {{- '<|im_start|>system\\nEffort: ' + reasoning_effort + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' and message.reasoning_content
        and preserve_thinking is defined and preserve_thinking %}
        {{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' }}
    {%- endif %}
    {{- message.content + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n<think>\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("qwen")
    template = root / "template.jinja"
    template.write_text(TEMPLATE)
    model: Path = write_fake_model(root / "fake")
    with run_fake_server(model, chat_template=str(template)) as server:
        yield server


@pytest.fixture
def server(running: RunningServer) -> RunningServer:
    running.call(running.engine.forget)
    return running


def prompt_of(server: RunningServer) -> str:
    ids = server.engine.requests[-1].prompt_token_ids
    return server.context.tokenizer.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize(
    "fields",
    [
        {"reasoning_effort": "low"},
        {"chat_template_kwargs": {"reasoning_effort": "low"}},
        {"chat_template_kwargs": {"reasoning_effort": "low"}, "reasoning_effort": "high"},
        {"think": "low"},
        {"reasoning": {"effort": "low"}},
        {"reasoning": {"effort": "low"}, "reasoning_effort": "low", "enable_thinking": True},
    ],
    ids=str,
)
def test_degrees_reach_the_template(server: RunningServer, fields: dict[str, object]) -> None:
    server.chat(max_tokens=1, **fields)
    prompt = prompt_of(server)
    assert "system\nEffort: low<|im_end|>" in prompt and prompt.endswith("<think>\n")
    tokens = server.client.post("/tokenize", json={"messages": HI, **fields}).json()["tokens"]
    assert tokens == server.engine.requests[-1].prompt_token_ids


def test_degrees_in_other_apis(server: RunningServer) -> None:
    body = {"input": "hi", "max_output_tokens": 1, "reasoning": {"effort": "medium"}}
    assert server.client.post("/v1/responses", json=body).status_code == 200
    assert "Effort: medium" in prompt_of(server)
    for fields in ({}, {"reasoning_effort": "none"}, {"enable_thinking": True}):
        server.chat(max_tokens=1, **fields)
        assert "Effort" not in prompt_of(server)


@pytest.mark.parametrize(
    ("fields", "param", "message"),
    [
        ({"reasoning_effort": "low", "think": "high"}, "reasoning_effort", "contradict each other"),
        ({"reasoning_effort": "huge"}, "reasoning_effort", "low"),
        ({"reasoning_effort": "high"}, "messages", "chat template: no such effort: high"),
        (
            {"chat_template_kwargs": {"reasoning_effort": 3}},
            "chat_template_kwargs",
            "reasoning_effort must be text of 1 to 64 characters",
        ),
        (
            {"chat_template_kwargs": {"preserve_thinking": "yes"}},
            "chat_template_kwargs",
            "preserve_thinking must be true or false",
        ),
        (
            {"chat_template_kwargs": {"effort": "low"}},
            "chat_template_kwargs",
            "unknown key 'effort'; known are enable_thinking, preserve_thinking, reasoning_effort",
        ),
    ],
    ids=str,
)
def test_what_is_refused(
    server: RunningServer, fields: dict[str, object], param: str, message: str
) -> None:
    error = server.error(PATH, messages=HI, **fields)
    assert error["param"] == param and message in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "name"),
    [
        (PATH, {"messages": [{"role": "user", "content": [IMAGE]}]}, "image_url"),
        (
            "/v1/responses",
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input_image",
        ),
        (
            "/v1/messages",
            {
                "messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}],
                "max_tokens": 1,
            },
            "image",
        ),
    ],
)
def test_images_are_refused_by_name(
    server: RunningServer, path: str, body: dict[str, object], name: str
) -> None:
    response = server.client.post(path, json=body)
    assert response.status_code == 400
    message = response.json()["error"]["message"]
    assert repr(name) in message and "only text" in message


def test_the_servers_degree(tmp_path: Path) -> None:
    template = tmp_path / "template.jinja"
    template.write_text(TEMPLATE)
    with run_fake_server(
        write_fake_model(tmp_path / "fake"),
        chat_template=str(template),
        default_chat_template_kwargs={"reasoning_effort": "medium"},
    ) as server:
        server.chat(max_tokens=1)
        assert "Effort: medium" in prompt_of(server)
        server.chat(max_tokens=1, reasoning_effort="low")
        assert "Effort: low" in prompt_of(server)


@pytest.mark.parametrize("kept", [None, False, True])
def test_past_thinking(server: RunningServer, kept: bool | None) -> None:
    answer = {"role": "assistant", "content": "Yes.", "reasoning_content": "Hm."}
    wish = {} if kept is None else {"chat_template_kwargs": {"preserve_thinking": kept}}
    server.chat(messages=[*HI, answer, *HI], max_tokens=1, **wish)
    assert ("<think>\nHm.\n</think>\n\nYes." in prompt_of(server)) is (kept is True)


def test_developers_speak_as_the_system(server: RunningServer) -> None:
    server.chat(messages=[{"role": "developer", "content": "be brief"}, *HI], max_tokens=1)
    assert prompt_of(server).startswith("<|im_start|>system\nbe brief<|im_end|>\n")


@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>"])
@pytest.mark.parametrize("streamed", [False, True])
def test_thinking_that_the_prompt_opened(server: RunningServer, streamed: bool, end: str) -> None:
    """The answer begins within it; both ids of generation_config.json end it."""
    server.engine.script = lambda _: server.ids(f"Hm.\n</think>\n\nYes.{end}more")
    if streamed:
        choices = [chunk["choices"][0] for chunk in stream(server.client, PATH, {"messages": HI})]
        said = ["".join(one["delta"].get(name) or "" for one in choices) for name in FIELDS]
        reason = choices[-1]["finish_reason"]
    else:
        (choice,) = server.chat()["choices"]
        said = [choice["message"][name] for name in FIELDS]
        reason = choice["finish_reason"]
    assert (said, reason) == (["Hm.", "Yes."], "stop")
    server.engine.script = lambda _: server.ids(f"Yes.{end}")
    (choice,) = server.chat(enable_thinking=False)["choices"]
    assert [choice["message"][name] for name in FIELDS] == [None, "Yes."]


def test_calls_behind_thinking(server: RunningServer) -> None:
    server.engine.script = lambda _: server.ids(
        "I look.\n</think>\n\n<tool_call>\n<function=add>\n<parameter=a>\n3\n</parameter>\n"
        "<parameter=why>\ntwo\nlines\n</parameter>\n</function>\n</tool_call><|im_end|>"
    )
    schema = {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "why": {"type": "string"}},
    }
    tools = [{"type": "function", "function": {"name": "add", "parameters": schema}}]
    (choice,) = server.chat(tools=tools)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "add" and choice["finish_reason"] == "tool_calls"
    assert json.loads(call["function"]["arguments"]) == {"a": 3, "why": "two\nlines"}
    assert choice["message"]["reasoning_content"] == "I look."
