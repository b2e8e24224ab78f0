"""Tool calls in every form, streamed and whole, read by the openai client's own stream helper."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import tokenizers
from openai.types.chat import ChatCompletionMessageFunctionToolCall as Call
from tokenizers import AddedToken

from tests.serve.conftest import MODEL_NAME, RunningServer, run_fake_server
from tests.serve.fake_model import TEMPLATE, vocab_size, write_fake_model
from tests.serve.sse import stream

HI = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": name,
            "parameters": {
                "type": "object",
                "properties": {"text": {"type": "string"}, "size": {"type": "integer"}},
            },
        },
    }
    for name in ("write", "now")
]
ARGUMENTS = {"text": 'one "two" {three}\n«é» 😀', "size": 3}
WRITE = json.dumps({"name": "write", "arguments": ARGUMENTS})
NOW = '{"name": "now", "arguments": {}}'
CALLED = [("write", ARGUMENTS), ("now", {})]

LLAMA = ("<|python_tag|>", "<|eom_id|>", "<|eot_id|>", "<|start_header_id|>")
MISTRAL = ("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]")
ONE_CALL = (
    "{%- for m in messages %}{%- if m.tool_calls and m.tool_calls | length != 1 %}"
    "{{- raise_exception('This model only supports single tool-calls at once!') }}"
    "{%- endif %}{%- endfor %}{#- <|python_tag|> #}"
)
FORMS = {
    "hermes": (
        (),
        "",
        f"I look.\n<tool_call>\n{WRITE}\n</tool_call>\n<tool_call>{NOW}</tool_call>",
    ),
    "llama3_json": (
        LLAMA,
        ONE_CALL,
        f"I look.\n<|python_tag|>{WRITE.replace('arguments', 'parameters')}; {NOW}",
    ),
    "mistral": (MISTRAL, "{#- [TOOL_CALLS] #}", f"I look.\n[TOOL_CALLS] [{WRITE}, {NOW}]"),
    "qwen3_coder": (
        (),
        "{#- <tool_call><function= #}",
        "I look.\n<tool_call>\n<function=write>\n<parameter=text>\n"
        + str(ARGUMENTS["text"])
        + "\n</parameter>\n<parameter=size>\n3\n</parameter>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=now>\n</function>\n</tool_call>",
    ),
}


def write_model(folder: Path, special: tuple[str, ...], template: str) -> Path:
    """A fake model whose vocabulary and template are of some form of calls."""
    write_fake_model(folder)
    backend = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(token, special=True) for token in special])
    backend.save(str(folder / "tokenizer.json"))
    config = json.loads((folder / "config.json").read_text())
    config["vocab_size"] = vocab_size(backend)
    (folder / "config.json").write_text(json.dumps(config))
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    own = TEMPLATE.replace("<tool_call>", "<call>") if template else TEMPLATE
    settings["chat_template"] = template + own
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    ends = [settings["eos_token"], *(token for token in special if token[2:].startswith("eo"))]
    generation = {"eos_token_id": [backend.token_to_id(end) for end in ends]}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return folder


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], RunningServer]]:
    running: dict[str, RunningServer] = {}
    contexts = []

    def start(form: str) -> RunningServer:
        if form not in running:
            special, template, _ = FORMS[form]
            folder = write_model(tmp_path_factory.mktemp(form) / "fake", special, template)
            contexts.append(run_fake_server(folder))
            running[form] = contexts[-1].__enter__()
        server = running[form]
        server.call(server.engine.forget)
        return server

    yield start
    for context in contexts:
        context.__exit__(None, None, None)


def called(calls: list[Call] | None) -> list[tuple[str, object]]:
    return [(call.function.name, json.loads(call.function.arguments)) for call in calls or ()]


@pytest.mark.parametrize("form", FORMS)
def test_streamed_and_whole_are_the_same(
    servers: Callable[[str], RunningServer], form: str
) -> None:
    server, answer = servers(form), FORMS[form][2]
    end = "<|eom_id|>" if form == "llama3_json" else "<|im_end|>"
    server.engine.script = lambda _: server.ids(answer + end)
    assert server.context.answer_form.calls == form
    body = {"model": MODEL_NAME, "messages": HI, "tools": TOOLS}
    whole = server.openai.chat.completions.create(**body).choices[0]
    with server.openai.chat.completions.stream(**body) as events:
        kinds = [event.type for event in events]
        streamed = events.get_final_completion().choices[0]
    for choice in (whole, streamed):
        assert choice.message.content == "I look."
        assert choice.finish_reason == "tool_calls"
        assert called(choice.message.tool_calls) == CALLED
        assert len({call.id for call in choice.message.tool_calls}) == 2
    texts = [call.function.arguments for call in whole.message.tool_calls]
    assert texts == [call.function.arguments for call in streamed.message.tool_calls]
    # Arguments came in pieces, and each call ended before the answer did.
    assert kinds.count("tool_calls.function.arguments.delta") > 3
    assert kinds.count("tool_calls.function.arguments.done") == 2


def test_bare_json_is_a_call_of_llama(servers: Callable[[str], RunningServer]) -> None:
    server = servers("llama3_json")
    server.engine.script = lambda _: server.ids('{"name": "now", "parameters": {}}<|eot_id|>')
    choice = server.chat(tools=TOOLS)["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["stop_reason"] is None
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "now", "arguments": "{}"}
    text = '{"name": "Alice", "parameters": {}}'
    server.engine.script = lambda _: server.ids(text + "<|eot_id|>")
    choice = server.chat(tools=TOOLS)["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == (text, "stop")


def test_markers_are_shown_with_tools_only(servers: Callable[[str], RunningServer]) -> None:
    server = servers("mistral")
    server.engine.script = lambda _: server.ids("[TOOL_CALLS]one<|endoftext|>two<|im_end|>")
    assert server.chat()["choices"][0]["message"]["content"] == "onetwo"
    message = server.chat(tools=TOOLS)["choices"][0]["message"]
    assert message["content"] == "[TOOL_CALLS]onetwo"


def test_tags_that_a_checkpoint_calls_special(tmp_path: Path) -> None:
    tags = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    folder = write_model(tmp_path / "fake", (), "")
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    for token in settings["added_tokens_decoder"].values():
        token["special"] = token["special"] or token["content"] in tags
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with run_fake_server(folder) as server:
        assert set(tags) <= set(server.context.tokenizer.special_tokens)
        thinking = "<think>\nHm.\n</think>"
        answer = f"{thinking}\n{FORMS['hermes'][2]}<|im_end|>"
        server.engine.script = lambda _: server.ids(answer)
        whole = server.chat(tools=TOOLS)
        message = whole["choices"][0]["message"]
        assert (message["reasoning"], message["content"]) == ("Hm.", "I look.")
        assert len(message["tool_calls"]) == 2
        details = whole["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == len(server.ids(thinking))
        message = server.chat()["choices"][0]["message"]
        assert message["content"].startswith("I look.") and "<tool_call>" not in message["content"]


def test_an_answer_that_is_cut_short(servers: Callable[[str], RunningServer]) -> None:
    server = servers("hermes")
    server.engine.script = lambda _: server.ids(f"<tool_call>\n{WRITE}")
    choice = server.chat(tools=TOOLS, max_tokens=20)["choices"][0]
    arguments = choice["message"]["tool_calls"][0]["function"]["arguments"]
    assert choice["finish_reason"] == "length"
    assert json.dumps(ARGUMENTS).startswith(arguments) and arguments != json.dumps(ARGUMENTS)


@pytest.mark.parametrize("form", FORMS)
def test_a_stop_string_within_a_call(servers: Callable[[str], RunningServer], form: str) -> None:
    server = servers(form)
    server.engine.script = lambda _: server.ids(FORMS[form][2] + "<|im_end|>")
    for stop, reason in (("two", "stop"), ("I l", "stop"), ("nothing of it", "tool_calls")):
        body = {"messages": HI, "tools": TOOLS, "stop": [stop]}
        assert server.chat(**body)["choices"][0]["finish_reason"] == reason
        chunks = stream(server.client, "/v1/chat/completions", body)
        assert chunks[-1]["choices"][0]["finish_reason"] == reason
    body = {"input": "hi", "tools": [{"type": "function", **TOOLS[0]["function"]}]}
    for stop, status in (("two", "incomplete"), ("nothing of it", "completed")):
        answer = server.client.post("/v1/responses", json={**body, "stop": [stop]}).json()
        assert answer["output"][-1]["status"] == status


@pytest.mark.parametrize("form", FORMS)
def test_a_stop_string_within_the_tags_of_a_call(
    servers: Callable[[str], RunningServer], form: str
) -> None:
    server = servers(form)
    server.engine.script = lambda _: server.ids(FORMS[form][2] + "<|im_end|>")
    for stop in ("write", '"name"', "<function="):
        if stop not in FORMS[form][2]:
            continue
        body = {"messages": HI, "tools": TOOLS, "stop": [stop]}
        choice = server.chat(**body)["choices"][0]
        assert choice["message"]["content"].strip() == "I look."
        assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", stop)
        chunks = stream(server.client, "/v1/chat/completions", body)
        deltas = [one["delta"] for chunk in chunks for one in chunk["choices"]]
        assert "".join(one.get("content") or "" for one in deltas).strip() == "I look."


def test_a_stop_string_behind_what_may_begin_a_tag(
    servers: Callable[[str], RunningServer],
) -> None:
    server = servers("hermes")
    server.engine.script = lambda _: server.ids("if a <= b<|im_end|>")
    answer = server.chat(tools=TOOLS, stop=["="])["choices"][0]
    assert answer["message"]["content"] == "if a <"


def test_a_stop_string_behind_a_call(servers: Callable[[str], RunningServer]) -> None:
    server = servers("hermes")
    server.engine.script = lambda _: server.ids(FORMS["hermes"][2])
    choice = server.chat(tools=TOOLS, stop=["</tool_call>"])["choices"][0]
    assert choice["finish_reason"] == "tool_calls" and choice["stop_reason"] == "</tool_call>"


def test_what_a_template_refuses_is_said(servers: Callable[[str], RunningServer]) -> None:
    server = servers("llama3_json")
    call = {"type": "function", "function": {"name": "now", "arguments": "{}"}}
    calls = [{**call, "id": "1"}, {**call, "id": "2"}]
    messages = [*HI, {"role": "assistant", "tool_calls": calls}]
    error = server.error("/v1/chat/completions", messages=messages, tools=TOOLS)
    assert "This model only supports single tool-calls at once!" in error["message"]
    server.chat(messages=[*HI, {"role": "assistant", "tool_calls": calls[:1]}], max_tokens=1)


def test_flags_win_over_the_template(fake_model: Path) -> None:
    settings = {"tool_call_parser": "qwen3_coder", "reasoning_parser": "deepseek_r1"}
    with run_fake_server(fake_model, **settings) as server:
        _, _, answer = FORMS["qwen3_coder"]
        server.engine.script = lambda _: server.ids(f"Hm.</think>\n{answer}<|im_end|>")
        message = server.chat(tools=TOOLS)["choices"][0]["message"]
        assert (message["reasoning_content"], message["content"]) == ("Hm.", "I look.")
        assert [call["function"]["name"] for call in message["tool_calls"]] == ["write", "now"]
        answer = server.chat()
        assert answer["choices"][0]["message"]["reasoning"] == "Hm."
        num_thinking = len(server.ids("Hm.</think>"))
        details = answer["usage"]["completion_tokens_details"]
        assert details["reasoning_tokens"] == num_thinking
