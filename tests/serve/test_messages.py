"""/v1/messages against the scripted engine: order of events, translation, refusals, errors."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.serve.conftest import MODEL_NAME, RunningServer
from tests.serve.fake_engine import CYCLE

PATH = "/v1/messages"
COUNT = "/v1/messages/count_tokens"
HI = [{"role": "user", "content": "hi"}]
TOOLS = [
    {
        "name": "add",
        "description": "Adds",
        "input_schema": {"type": "object", "properties": {"a": {"type": "number"}}},
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
EVERYTHING = f"<think>\nLet me see.\n</think>\n\nI add.\n{CALL}\n{CALL}<|im_end|>"
BILLING = "x-anthropic-billing-header: cc_version=2.1; cch=5f3a1;"


def prompt_text(server: RunningServer) -> str:
    ids = server.engine.requests[-1].prompt_token_ids
    return server.context.tokenizer.decode(ids, skip_special_tokens=False)


def send(server: RunningServer, **body: object) -> dict:
    response = server.client.post(PATH, json={"messages": HI, "max_tokens": 100, **body})
    assert response.status_code == 200, response.text
    return response.json()


def rendered(server: RunningServer, **body: object) -> str:
    send(server, **{"max_tokens": 1, **body})
    return prompt_text(server)


def events_of(server: RunningServer, **body: object) -> list[dict]:
    """The events of a stream; checks the framing and the names."""
    body = {"messages": HI, "max_tokens": 100, "stream": True, **body}
    response = server.client.post(PATH, json=body, headers={"anthropic-version": "2023-06-01"})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
    return events


def error_of(server: RunningServer, path: str, status: int, body: object, **headers: str) -> dict:
    response = server.client.post(path, json=body, headers=headers)
    assert response.status_code == status, response.text
    answer = response.json()
    assert set(answer) == {"type", "error"} and answer["type"] == "error"
    assert set(answer["error"]) - {"details"} == {"type", "message"}
    return answer["error"]


def test_a_text(server: RunningServer) -> None:
    answer = send(server, max_tokens=12, metadata={"user_id": "u"})
    text = server.context.tokenizer.decode(server.ids(CYCLE)[:12])
    assert answer["content"] == [{"type": "text", "text": text}]
    assert (answer["type"], answer["role"], answer["model"]) == ("message", "assistant", MODEL_NAME)
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("max_tokens", None)
    prompt = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert prompt_text(server) == prompt
    usage = answer["usage"]
    num_prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert (num_prompt, usage["output_tokens"]) == (len(server.ids(prompt)), 12)
    counted = server.client.post(COUNT, json={"messages": HI, "model": MODEL_NAME}).json()
    assert counted == {"input_tokens": num_prompt}
    assert answer["metrics"]["speculative_decoding"]["num_drafts"] > 0


def test_events_in_order(server: RunningServer) -> None:
    """As Anthropic's documentation has them."""
    server.engine.script = lambda _: server.ids(EVERYTHING)
    events = events_of(server, tools=TOOLS)
    steps = [
        (event["type"], event.get("index"), event.get("delta", {}).get("type")) for event in events
    ]
    once = [step for i, step in enumerate(steps) if i == 0 or step != steps[i - 1]]
    start, delta, stop = (f"content_block_{kind}" for kind in ("start", "delta", "stop"))
    assert once == [
        ("message_start", None, None),
        ("ping", None, None),
        (start, 0, None),
        (delta, 0, "thinking_delta"),
        (delta, 0, "signature_delta"),
        (stop, 0, None),
        *((start, 1, None), (delta, 1, "text_delta"), (stop, 1, None)),
        *((start, 2, None), (delta, 2, "input_json_delta"), (stop, 2, None)),
        *((start, 3, None), (delta, 3, "input_json_delta"), (stop, 3, None)),
        ("message_delta", None, None),
        ("message_stop", None, None),
    ]
    assert steps.count((delta, 2, "input_json_delta")) > 1, "arguments come in pieces"
    opening = events[0]["message"]
    assert (opening["content"], opening["stop_reason"]) == ([], None)
    assert events[-2]["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}
    # What the deltas add to the openings is the whole answer.
    blocks = [event["content_block"] for event in events if event["type"] == start]
    texts = [""] * len(blocks)
    for event in events:
        if event["type"] == delta:
            kind = event["delta"]["type"].removesuffix("_delta")
            name = "partial_json" if kind == "input_json" else kind
            if kind == "signature":
                blocks[event["index"]]["signature"] = event["delta"]["signature"]
            else:
                texts[event["index"]] += event["delta"][name]
    for block, text in zip(blocks, texts, strict=True):
        key = {"tool_use": "input"}.get(block["type"], block["type"])
        assert block[key] in ("", {})
        block[key] = json.loads(text) if key == "input" else text
    whole = send(server, tools=TOOLS)
    assert len({block.pop("id") for block in (*blocks[2:], *whole["content"][2:])}) == 4
    assert whole["content"] == blocks
    assert blocks[2] == {"type": "tool_use", "name": "add", "input": {"a": 1}}
    assert whole["stop_reason"] == "tool_use"
    assert whole["usage"]["output_tokens"] == events[-2]["usage"]["output_tokens"]
    num_thinking = len(server.ids("<think>\nLet me see.\n</think>"))
    assert whole["usage"]["output_tokens_details"] == {"thinking_tokens": num_thinking}


def test_a_conversation_goes_round(server: RunningServer) -> None:
    server.engine.script = lambda _: server.ids(EVERYTHING)
    answer = send(server, tools=TOOLS)
    results = [
        {"type": "tool_result", "tool_use_id": call["id"], "content": content}
        for call, content in zip(
            answer["content"][2:], ["2", [{"type": "text", "text": "3"}]], strict=True
        )
    ]
    turns = [
        *HI,
        {"role": "assistant", "content": answer["content"]},
        {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]},
    ]
    assert rendered(server, messages=turns, tools=TOOLS).endswith(
        f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nI add.\n{CALL}\n{CALL}<|im_end|>\n"
        "<|im_start|>tool\n2<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n"
        "<|im_start|>user\ngo on<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("parts", [{}, {"description": "Adds"}, {"strict": False}], ids=str)
def test_a_tool_is_the_same_prompt_in_each_form(server: RunningServer, parts: dict) -> None:
    schema = TOOLS[0]["input_schema"]
    own = rendered(server, tools=[{"name": "add", "input_schema": schema, **parts}])
    given = {"name": "add", "parameters": schema, **parts}
    body = {"messages": HI, "max_tokens": 1, "tools": [{"type": "function", "function": given}]}
    assert server.client.post("/v1/chat/completions", json=body).status_code == 200
    chat = prompt_text(server)
    body = {"input": "hi", "max_output_tokens": 1, "tools": [{"type": "function", **given}]}
    assert server.client.post("/v1/responses", json=body).status_code == 200
    assert chat == prompt_text(server) == own
    assert "null" not in chat


def test_the_billing_line_never_reaches_the_prompt(server: RunningServer) -> None:
    block = {"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}}
    plain = rendered(server, system="be kind")
    assert plain.startswith("<|im_start|>system\nbe kind<|im_end|>\n")
    first = {"type": "text", "text": BILLING}
    assert rendered(server, system=[first, block]) == plain
    assert rendered(server, system=f"{BILLING}\nbe kind") == plain
    assert "system" not in rendered(server, system=BILLING)
    assert rendered(server, system=[block, block]).startswith(
        "<|im_start|>system\nbe kind\nbe kind"
    )


def test_messages_in_a_row_are_one(server: RunningServer) -> None:
    turns = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": [{"type": "text", "text": "b"}]},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
        {"role": "user", "content": "e"},
    ]
    assert rendered(server, messages=turns) == (
        "<|im_start|>user\na\nb<|im_end|>\n<|im_start|>assistant\nc\nd<|im_end|>\n"
        "<|im_start|>user\ne<|im_end|>\n<|im_start|>assistant\n"
    )


def test_an_answer_at_the_end_goes_on(server: RunningServer) -> None:
    turns = [*HI, {"role": "assistant", "content": "The answer is"}]
    assert rendered(server, messages=turns).endswith("<|im_start|>assistant\nThe answer is")


def test_thinking_is_switched(server: RunningServer) -> None:
    closed = "<think>\n\n</think>\n\n"
    thinking = {"type": "enabled", "budget_tokens": 1024}
    assert rendered(server, thinking={"type": "disabled"}).endswith(closed)
    assert not rendered(server, thinking=thinking).endswith(closed)
    assert not rendered(server, thinking={"type": "adaptive"}).endswith(closed)


def test_why_it_stopped(server: RunningServer) -> None:
    server.engine.script = lambda _: server.ids("one two three four<|im_end|>")
    assert send(server)["stop_reason"] == "end_turn"
    answer = send(server, stop_sequences=[" three"])
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", " three")
    assert answer["content"][0]["text"] == "one two"
    *_, end, _ = events_of(server, stop_sequences=[" three"])
    assert end["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": " three"}


def test_tool_options(server: RunningServer) -> None:
    server.engine.script = lambda _: server.ids(f"{CALL}\n{CALL}<|im_end|>")
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    assert len(send(server, tools=TOOLS, tool_choice=choice)["content"]) == 1
    answer = send(server, tools=TOOLS, tool_choice={"type": "none"})
    assert answer["content"] == [{"type": "text", "text": f"{CALL}\n{CALL}"}]
    assert "add" not in prompt_text(server)
    search = {"type": "web_search_20250305", "name": "web_search", "max_uses": 8}
    send(server, tools=[search, *TOOLS])
    assert '"add"' in prompt_text(server) and "web_search" not in prompt_text(server)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("{}", {}),
        ('{"a": 1, ', {"_raw": '{"a": 1, '}),
        ('{"a": "\\ud800"}', {"_raw": '{"a": "\\ud800"}'}),
        ('{"a": NaN}', {"_raw": '{"a": NaN}'}),
        ('{"a": 1e999}', {"_raw": '{"a": 1e999}'}),
    ],
)
def test_arguments_as_an_object(server: RunningServer, arguments: str, expected: dict) -> None:
    text = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call>'
    if expected and arguments.endswith(", "):
        text = text[: text.index(arguments) + len(arguments)]
    server.engine.script = lambda _: server.ids(f"{text}<|im_end|>")
    (call,) = send(server, tools=TOOLS)["content"]
    assert call["input"] == expected


def test_numbers_of_arguments_are_as_they_are_spelled(server: RunningServer) -> None:
    arguments = '{"a":1.10,"b":[1e2,18446744073709551615,123456789012345678.5]}'
    text = f'<tool_call>\n{{"name": "add", "arguments": {arguments}}}\n</tool_call><|im_end|>'
    server.engine.script = lambda _: server.ids(text)
    body = {"messages": HI, "max_tokens": 200, "tools": TOOLS}
    assert f'"input":{arguments}' in server.client.post(PATH, json=body).text


def test_too_many_tokens_are_as_many_as_fit(server: RunningServer) -> None:
    server.engine.script = lambda _: server.ids("one<|im_end|>")
    assert send(server, max_tokens=2**31 - 1)["stop_reason"] == "end_turn"
    assert server.engine.requests[-1].sampling.max_tokens < 4096


def turn(**fields: object) -> list[dict]:
    return [{"role": "user", "content": [fields]}]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("max_tokens", None),
        ("messages", []),
        ("messages", [{"role": "tool", "content": "x"}]),
        ("messages", turn(type="image", source={"type": "url", "url": "http://x"})),
        ("messages", turn(type="document")),
        ("messages", turn(type="tool_result", content="x")),
        (
            "messages",
            turn(type="tool_result", tool_use_id="1", content=[{"type": "image"}]),
        ),
        ("messages", [*HI, {"role": "assistant", "content": [{"type": "tool_use"}]}]),
        (
            "messages",
            [
                *HI,
                {
                    "role": "assistant",
                    "content": [{"type": "tool_use", "id": "1", "name": "add", "input": {}}],
                },
            ],
        ),
        ("messages", [{"role": "user", "content": "x y " * 2000}]),
        ("system", [{"type": "image"}]),
        ("tools", [{"name": "add"}]),
        ("tools", [{**TOOLS[0], "strict": True}]),
        ("tool_choice", {"type": "any"}),
        ("tool_choice", {"type": "tool", "name": "add"}),
        ("tool_choice", {"type": "tool"}),
        ("enable_thinking", False),
        ("thinking", {"type": "perhaps"}),
        ("output_config", {"format": {"type": "json_schema"}}),
        ("output_format", {"type": "json_schema"}),
        ("output_format", {"type": "json_schema", "schema": {"not": {}}}),
        ("mcp_servers", [{"type": "url"}]),
        ("compaction", {"type": "summarize"}),
        ("thread", {"type": "create"}),
        ("n", 2),
        ("speculative", {"detailed": True}),
        ("return_token_ids", True),
        ("temperature", "hot"),
    ],
)
def test_refusals_name_the_field(server: RunningServer, field: str, value: object) -> None:
    for streams in (False, True):
        body = {"messages": HI, "max_tokens": 5, field: value, "stream": streams}
        error = error_of(server, PATH, 400, body)
        assert error["type"] == "invalid_request_error"
        assert field in error["message"], error


def test_a_form_beside_a_message_that_goes_on_is_refused_in_this_apis_words(
    server: RunningServer,
) -> None:
    messages = [*HI, {"role": "assistant", "content": "{"}]
    form = {"format": {"type": "json_schema", "schema": {"type": "object"}}}
    body = {"messages": messages, "max_tokens": 5, "output_config": form}
    message = error_of(server, PATH, 400, body)["message"]
    assert "output_config.format and an assistant's last message" in message
    assert "continue_final_message" not in message


def test_two_forms_that_differ_are_refused(server: RunningServer) -> None:
    form, other = ({"type": "json_schema", "schema": {"type": kind}} for kind in ("null", "object"))
    body = {"messages": HI, "max_tokens": 5, "output_config": {"format": form}}
    assert server.client.post(PATH, json={**body, "output_format": form}).status_code == 200
    error = error_of(server, PATH, 400, {**body, "output_format": other})
    assert "output_config.format" in error["message"]


def test_a_conversation_that_the_server_would_keep(server: RunningServer) -> None:
    """The tool runner of Anthropic's SDK asks for one, and goes on without it by this code."""
    body = {"messages": HI, "max_tokens": 5}
    for thread in ({"type": "create"}, {"type": "continue", "previous_message_id": "msg-1"}):
        error = error_of(server, PATH, 400, {**body, "thread": thread})
        assert error["details"] == {"error_code": "thread_unsupported_request"}
    assert send(server, thread=None)["type"] == "message"
    assert "details" not in error_of(server, PATH, 400, {**body, "temperature": "hot"})


def test_errors_before_the_handler(start_server: Callable[..., RunningServer]) -> None:
    server = start_server(api_key=["secret"], max_body_bytes=2048)
    body = {"messages": HI, "max_tokens": 1}
    key = {"x-api-key": "secret"}
    assert error_of(server, PATH, 401, body)["type"] == "authentication_error"
    assert error_of(server, PATH, 401, body, **{"x-api-key": "s"})["type"] == "authentication_error"
    assert error_of(server, f"{PATH}/batches", 404, body, **key)["type"] == "not_found_error"
    other = {**body, "model": "other"}
    assert error_of(server, PATH, 404, other, **key)["type"] == "not_found_error"
    large = {**body, "system": "x" * 4096}
    assert error_of(server, PATH, 413, large, **key)["type"] == "request_too_large"
    assert server.client.post(PATH, json=body, headers=key).status_code == 200
    assert server.client.post(COUNT, json={"messages": HI}, headers=key).status_code == 200
    both = {**key, "authorization": "Bearer other"}
    assert server.client.post(PATH, json=body, headers=both).status_code == 200
    server.context.lifecycle.is_refusing = True
    assert error_of(server, PATH, 503, body, **key)["type"] == "overloaded_error"


def test_a_failure_is_the_last_event(start_server: Callable[..., RunningServer]) -> None:
    server = start_server({"step_s": 0.02})
    body = {"messages": HI, "max_tokens": 1000, "stream": True}
    with server.client.stream("POST", PATH, json=body) as response:
        lines = response.iter_lines()
        while "text_delta" not in next(lines):
            pass
        server.call(server.engine.die)
        *_, kind, data, _ = list(lines)
    assert kind == "event: error"
    error = json.loads(data.removeprefix("data: "))
    message = "The engine failed on this request."
    assert error == {"type": "error", "error": {"type": "api_error", "message": message}}


def test_blocks_of_other_apis_are_text(server: RunningServer) -> None:
    blocks = [{"type": "output_text", "text": "Yes."}, {"type": "refusal", "refusal": "No."}]
    asked = {"role": "user", "content": [{"type": "input_text", "text": "And?"}]}
    text = rendered(server, messages=[*HI, {"role": "assistant", "content": blocks}, asked])
    assert "Yes.\nNo." in text and "And?" in text


@pytest.mark.parametrize(
    ("blocks", "end"),
    [
        ([], "<|im_start|>assistant\n"),
        ([{"type": "redacted_thinking", "data": "x"}], "<|im_start|>assistant\n"),
        ([{"type": "text", "text": "\n"}], "<|im_start|>assistant\n"),
        ([{"type": "thinking", "thinking": "Let me"}], "assistant\n<think>\nLet me"),
    ],
)
def test_an_answer_goes_on_where_it_ended(
    server: RunningServer, blocks: list[dict], end: str
) -> None:
    messages = [*HI, {"role": "assistant", "content": blocks}]
    assert rendered(server, messages=messages).endswith(end)


def test_stop_sequences_begin_after_the_thinking(server: RunningServer) -> None:
    said = "<think>\nLet me greet.\n</think>\n\nI greet you.<|im_end|>"
    server.engine.script = lambda _: server.ids(said)
    answer = send(server, stop_sequences=["greet"])
    assert [block["type"] for block in answer["content"]] == ["thinking", "text"]
    assert (answer["stop_reason"], answer["content"][1]["text"]) == ("stop_sequence", "I ")


def test_what_a_tool_choice_lacks_is_said_in_this_api_s_words(server: RunningServer) -> None:
    for choice, words in (({"type": "any"}, "needs tools"), ({"type": "tool"}, "name of a tool")):
        body = {"messages": HI, "max_tokens": 1, "tool_choice": choice}
        message = server.client.post(PATH, json=body).json()["error"]["message"]
        assert words in message and "function'" not in message


def test_an_aborted_answer_can_go_on(start_server: Callable[..., RunningServer]) -> None:
    server = start_server({"step_s": 0.02})
    body = {"messages": HI, "max_tokens": 1000, "stream": True}
    with server.client.stream("POST", PATH, json=body) as response:
        lines = response.iter_lines()
        while "text_delta" not in next(lines):
            pass
        server.client.post("/abort_request", json={"abort_all": True})
        rest = "\n".join(lines)
    assert '"stop_reason":"pause_turn"' in rest and rest.rstrip().endswith('"message_stop"}')
    assert server.context.num_sequences == 0


def test_it_is_counted_and_listed(server: RunningServer) -> None:
    send(server, max_tokens=1)
    assert f'"{COUNT}"' in server.client.get("/openapi.json").text
    assert f'path="{PATH}",status="200"' in server.client.get("/metrics").text
