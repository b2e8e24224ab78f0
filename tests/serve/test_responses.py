"""/v1/responses against the scripted engine, read by the official client."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable

import httpx
import openai
import pytest
from openai.types.responses import ResponseItem
from pydantic import TypeAdapter

from tests.serve.conftest import MODEL_NAME, RunningServer
from tests.serve.fake_engine import CYCLE

PATH = "/v1/responses"
TOOLS = [
    {
        "type": "function",
        "name": "add",
        "description": "Adds",
        "parameters": {"type": "object", "properties": {"a": {"type": "number"}}},
        "strict": False,
    }
]
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
EVERYTHING = f"<think>\nLet me see.\n</think>\n\nI add.\n{CALL}\n{CALL}<|im_end|>"


def prompt_text(server: RunningServer) -> str:
    ids = server.engine.requests[-1].prompt_token_ids
    return server.context.tokenizer.decode(ids, skip_special_tokens=False)


def respond(server: RunningServer, **body: object) -> dict:
    response = server.client.post(PATH, json={"input": "hi", **body})
    assert response.status_code == 200, response.text
    return response.json()


def events_of(server: RunningServer, **body: object) -> list[dict]:
    """The events of a stream; checks the framing, the numbers and the names."""
    response = server.client.post(PATH, json={"input": "hi", "stream": True, **body})
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        events.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {events[-1]['type']}"
        assert events[-1]["sequence_number"] == number
    return events


def test_tokens_of_an_input_are_counted(server: RunningServer) -> None:
    count = server.openai.responses.input_tokens.count
    asked = {"model": MODEL_NAME, "input": "hi", "tools": TOOLS, "instructions": "be kind"}
    answer = server.openai.responses.create(**asked)
    num_requests = len(server.engine.requests)
    counted = count(**asked)
    assert counted.object == "response.input_tokens"
    assert counted.input_tokens == answer.usage.input_tokens
    assert counted.input_tokens > count(**{**asked, "tools": []}).input_tokens
    both = {**asked, "previous_response_id": answer.id}
    assert count(**both).input_tokens > answer.usage.total_tokens
    assert len(server.engine.requests) == num_requests, "nothing is generated"
    path = f"{PATH}/input_tokens"
    error = server.error(path, input=[{"type": "image_generation_call"}])
    assert error["param"] == "input"
    assert server.error(path, input="hi", conversation="c")["param"] == "conversation"
    assert server.error(path, 404, input="hi", model="none")["code"] == "model_not_found"
    assert server.client.get(path).status_code == 405


def test_a_text(server: RunningServer) -> None:
    answer = server.openai.responses.create(model=MODEL_NAME, input="hi", max_output_tokens=12)
    assert answer.object == "response" and answer.id.startswith("resp-")
    assert answer.output_text == server.context.tokenizer.decode(server.ids(CYCLE)[:12])
    assert answer.output[0].type == "message" and answer.output[0].role == "assistant"
    assert (answer.status, answer.incomplete_details.reason) == ("incomplete", "max_output_tokens")
    assert prompt_text(server) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert (answer.usage.output_tokens, answer.usage.output_tokens_details.reasoning_tokens) == (
        12,
        0,
    )
    assert answer.usage.total_tokens == answer.usage.input_tokens + 12
    assert answer.model_extra["metrics"]["speculative_decoding"]["num_drafts"] > 0


def test_every_kind_of_item_in_order(server: RunningServer) -> None:
    server.engine.script = lambda _: server.ids(EVERYTHING)
    answer = server.openai.responses.create(
        model=MODEL_NAME,
        input="hi",
        tools=TOOLS,
        metadata={"a": "b"},
        instructions="be kind",
        extra_body={"seed": 7},
    )
    reasoning, message, *calls = answer.output
    assert reasoning.content[0].text == "Let me see." and reasoning.summary == []
    assert message.content[0].text == answer.output_text == "I add."
    assert [json.loads(call.arguments) for call in calls] == [{"a": 1}] * 2
    assert [call.name for call in calls] == ["add", "add"]
    assert len({call.call_id for call in calls}) == 2
    assert len({item.id for item in answer.output}) == 4
    assert {item.status for item in answer.output} == {"completed"}
    assert answer.status == "completed" and answer.error is None
    assert (answer.metadata, answer.model_extra["seed"]) == ({"a": "b"}, 7)
    assert answer.model_extra["store"] is True and answer.instructions == "be kind"
    num_thinking = len(server.ids("<think>\nLet me see.\n</think>"))
    assert answer.usage.output_tokens_details.reasoning_tokens == num_thinking
    assert [tool.name for tool in answer.tools] == ["add"]


ITEM = ["response.output_item.added", "response.output_item.done"]
PART = ["response.content_part.added", "response.content_part.done"]


def test_events_in_order(server: RunningServer) -> None:
    server.engine.script = lambda _: server.ids(EVERYTHING)
    events = events_of(server, tools=TOOLS)
    kinds = [event["type"] for event in events]
    once = [kind for i, kind in enumerate(kinds) if i == 0 or kind != kinds[i - 1]]
    text, thinking, call = (
        [f"response.{name}.delta", f"response.{name}.done"]
        for name in ("output_text", "reasoning_text", "function_call_arguments")
    )
    assert once == [
        *("response.created", "response.in_progress"),
        *(ITEM[0], PART[0], *thinking, PART[1], ITEM[1]),
        *(ITEM[0], PART[0], *text, PART[1], ITEM[1]),
        *(ITEM[0], *call, ITEM[1]),
        *(ITEM[0], *call, ITEM[1]),
        "response.completed",
    ]
    assert kinds.count(call[0]) > 2, "arguments come in pieces"
    assert events[0]["response"]["status"] == "in_progress"
    final = events[-1]["response"]
    whole = respond(server, tools=TOOLS)
    for one in (final, whole):
        for item in one["output"]:
            item.pop("id")
            item.pop("call_id", None)
    assert final["output"] == whole["output"]
    assert final["usage"]["output_tokens"] == whole["usage"]["output_tokens"]
    # Deltas are the text, and name the item that they belong to.
    items = [event["item"] for event in events if event["type"] == ITEM[1]]
    for index, item in enumerate(items):
        own = [event for event in events if event.get("output_index") == index]
        ids = {event.get("item_id") or event["item"]["id"] for event in own}
        assert ids == {item["id"]}
        joined = "".join(event.get("delta", "") for event in own)
        assert joined == (item.get("arguments") or item["content"][0]["text"])


def test_the_clients_stream_helper(server: RunningServer) -> None:
    server.engine.script = lambda _: server.ids(EVERYTHING)
    with server.openai.responses.stream(model=MODEL_NAME, input="hi", tools=TOOLS) as events:
        snapshots = [e.snapshot for e in events if e.type == "response.output_text.delta"]
        final = events.get_final_response()
    assert snapshots[-1] == final.output_text == "I add."
    assert [item.type for item in final.output] == [
        *("reasoning", "message", "function_call", "function_call")
    ]
    assert final.output[2].arguments == '{"a": 1}'


def test_a_conversation_goes_round(server: RunningServer) -> None:
    server.engine.script = lambda _: server.ids(EVERYTHING)
    client = server.openai
    first = client.responses.create(model=MODEL_NAME, input="hi", tools=TOOLS)
    turns = [{"role": "user", "content": "hi"}, *(item.to_dict() for item in first.output)]
    for item in first.output[2:]:
        turns.append({"type": "function_call_output", "call_id": item.call_id, "output": "2"})
    client.responses.create(
        model=MODEL_NAME, input=turns, tools=TOOLS, instructions="be kind", max_output_tokens=1
    )
    text = prompt_text(server)
    assert text.endswith(
        f"<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nI add.\n{CALL}\n{CALL}<|im_end|>\n"
        "<|im_start|>tool\n2<|im_end|>\n<|im_start|>tool\n2<|im_end|>\n<|im_start|>assistant\n"
    )


def test_messages(server: RunningServer) -> None:
    respond(
        server,
        instructions="one",
        input=[
            {"role": "developer", "content": "two"},
            {"type": "message", "role": "system", "content": [{"type": "input_text", "text": "3"}]},
            {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
            {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
            {"role": "assistant", "content": "c"},
            {"role": "user", "content": "d"},
        ],
        max_output_tokens=1,
    )
    assert prompt_text(server) == (
        "<|im_start|>system\none\n\ntwo\n\n3<|im_end|>\n<|im_start|>user\na<|im_end|>\n"
        "<|im_start|>assistant\nb<|im_end|>\n<|im_start|>assistant\nc<|im_end|>\n"
        "<|im_start|>user\nd<|im_end|>\n<|im_start|>assistant\n"
    )


def test_thinking_is_switched(server: RunningServer) -> None:
    closed = "<think>\n\n</think>\n\n"
    for effort, is_off in (("none", True), ("low", False)):
        respond(server, reasoning={"effort": effort, "summary": "auto"}, max_output_tokens=1)
        assert prompt_text(server).endswith(closed) is is_off
    respond(server, reasoning={"enabled": False}, max_output_tokens=1)
    assert prompt_text(server).endswith(closed)


def test_what_agents_send(server: RunningServer, caplog: pytest.LogCaptureFixture) -> None:
    """A probe without input, tools of other types, fields that ask for nothing."""
    assert respond(server, input=[], max_output_tokens=1)["usage"]["output_tokens"] == 1
    others = [
        {"type": "web_search", "external_web_access": False},
        {"type": "custom", "name": "patch", "format": {"type": "grammar", "syntax": "lark"}},
        {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "x"}]},
    ]
    with caplog.at_level(logging.INFO, "openspec.serve.generation.context"):
        for _ in range(2):
            answer = respond(
                server,
                tools=[*others, *TOOLS],
                tool_choice="auto",
                include=["reasoning.encrypted_content", "web_search_call.action.sources"],
                store=False,
                prompt_cache_key="x",
                context_management=[],
                service_tier="auto",
                client_metadata={"a": "b"},
                text={"verbosity": "low"},
                max_output_tokens=1,
            )
    assert len(answer["tools"]) == 4
    assert '"add"' in prompt_text(server) and "patch" not in prompt_text(server)
    noted = [record.getMessage() for record in caplog.records]
    assert len(noted) == 3 and "'custom' are skipped" in noted[0]


def test_tool_options(server: RunningServer) -> None:
    server.engine.script = lambda _: server.ids(f"{CALL}\n{CALL}<|im_end|>")
    assert len(respond(server, tools=TOOLS, parallel_tool_calls=False)["output"]) == 1
    (message,) = respond(server, tools=TOOLS, tool_choice="none")["output"]
    assert message["content"][0]["text"] == f"{CALL}\n{CALL}"
    assert "add" not in prompt_text(server)


def test_an_answer_that_is_cut_short(server: RunningServer) -> None:
    server.engine.script = lambda _: server.ids(f"Hm.\n{CALL}")
    num_tokens = len(server.ids(f"Hm.\n{CALL}")) - len(server.ids("}}\n</tool_call>"))
    events = events_of(server, tools=TOOLS, max_output_tokens=num_tokens)
    assert events[-1]["type"] == "response.incomplete"
    answer = events[-1]["response"]
    assert answer["incomplete_details"] == {"reason": "max_output_tokens"}
    assert [item["status"] for item in answer["output"]] == ["completed", "incomplete"]


def item(**fields: object) -> list[dict]:
    return [{"role": "user", "content": "hi"}, fields]


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("background", True),
        ("conversation", "c"),
        ("prompt", {"id": "p"}),
        ("truncation", "auto"),
        ("max_output_tokens", 0),
        ("max_tokens", 5),
        ("n", 2),
        ("speculative", {"detailed": True}),
        ("top_logprobs", 2),
        ("return_token_ids", True),
        ("prompt_logprobs", 0),
        ("include", ["message.output_text.logprobs"]),
        ("text", {"format": {"name": "x"}}),
        ("tool_choice", "required"),
        ("tool_choice", {"type": "function", "name": "add"}),
        ("tools", [{**TOOLS[0], "strict": True}]),
        ("tools", [{"type": "function"}]),
        ("reasoning", {"effort": "huge"}),
        ("reasoning", {"exclude": True}),
        ("reasoning_effort", "none"),
        ("context_management", [{"type": "compaction"}]),
        ("metadata", {"a": 1}),
        ("temperature", "hot"),
        ("input", 5),
        ("input", item(type="message", role="user", content=[{"type": "input_image"}])),
        ("input", item(type="message", role="user")),
        ("input", item(type="message", content="x")),
        ("input", item(type="item_reference")),
        ("input", item(type="computer_call")),
        ("input", item(type="function_call", call_id="1")),
        ("input", item(type="function_call_output", call_id="1")),
        ("input", item(role="tool", content="x")),
        ("input", "x y " * 2000),
    ],
)
def test_refusals_name_the_field(server: RunningServer, field: str, value: object) -> None:
    for streams in (False, True):
        error = server.error(PATH, **{"input": "hi", field: value, "stream": streams})
        assert error["param"] == field, error


def test_a_failure_is_the_last_event(start_server: Callable[..., RunningServer]) -> None:
    server = start_server({"step_s": 0.02})
    body = {"input": "hi", "stream": True}
    with server.client.stream("POST", PATH, json=body) as response:
        lines = response.iter_lines()
        while "response.output_text.delta" not in next(lines):
            pass
        server.call(server.engine.die)
        *_, kind, data, _ = list(lines)
    assert kind == "event: response.failed"
    failed = json.loads(data.removeprefix("data: "))["response"]
    assert failed["status"] == "failed" and failed["output"][0]["type"] == "message"
    message = "The engine failed on this request."
    assert failed["error"] == {"code": "server_error", "message": message}


def test_it_is_counted_and_listed(server: RunningServer) -> None:
    respond(server, max_output_tokens=1)
    assert '"/v1/responses"' in server.client.get("/openapi.json").text
    assert 'path="/v1/responses",status="200"' in server.client.get("/metrics").text
    assert server.context.num_sequences == 0


@pytest.mark.parametrize("count", range(1, 30))
def test_a_call_that_is_cut_is_never_announced_as_completed(
    server: RunningServer, count: int
) -> None:
    server.engine.script = lambda _: server.ids(CALL + "<|im_end|>")
    body = {"tools": TOOLS, "max_output_tokens": count}
    events = events_of(server, **body)
    done = [one["item"] for one in events if one["type"] == "response.output_item.done"]
    last = events[-1]["response"]
    assert [item["status"] for item in done] == [item["status"] for item in last["output"]]
    for item in done:
        if item["type"] == "function_call" and item["status"] == "completed":
            json.loads(item["arguments"])
    assert "<" not in str(last["output"])
    assert [one["status"] for one in respond(server, **body)["output"]] == [
        item["status"] for item in done
    ]


def test_a_response_goes_on_from_another(server: RunningServer) -> None:
    server.engine.script = lambda _: server.ids(EVERYTHING)
    first = respond(server, tools=TOOLS, instructions="Be kind.")
    calls = [item for item in first["output"] if item["type"] == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": "2"}
        for call in calls
    ]
    second = respond(server, tools=TOOLS, input=results, previous_response_id=first["id"])
    assert second["previous_response_id"] == first["id"]
    by_id = prompt_text(server)
    assert "Be kind." not in by_id
    whole = [{"role": "user", "content": "hi"}, *first["output"], *results]
    respond(server, tools=TOOLS, input=whole, store=False)
    assert prompt_text(server) == by_id
    respond(server, tools=TOOLS, input="And now?", previous_response_id=second["id"])
    last = prompt_text(server)
    more = {"role": "user", "content": "And now?"}
    respond(server, tools=TOOLS, input=[*whole, *second["output"], more], store=False)
    assert prompt_text(server) == last


@pytest.mark.parametrize("streams", [False, True])
def test_items_are_found_by_their_ids(server: RunningServer, streams: bool) -> None:
    server.engine.script = lambda _: server.ids(EVERYTHING)
    body = {"tools": TOOLS}
    first = events_of(server, **body)[-1]["response"] if streams else respond(server, **body)
    assert first["store"] is True and len(first["output"]) == 4
    references = [{"type": "item_reference", "id": item["id"]} for item in first["output"]]
    user = {"role": "user", "content": "hi"}
    respond(server, tools=TOOLS, input=[user, *references, user])
    by_id = prompt_text(server)
    respond(server, tools=TOOLS, input=[user, *({"id": one["id"]} for one in references), user])
    assert prompt_text(server) == by_id
    respond(server, tools=TOOLS, input=[user, *first["output"], user])
    assert prompt_text(server) == by_id and "I add." in by_id
    (asked,) = server.openai.responses.input_items.list(first["id"]).data
    whole = [{"type": "item_reference", "id": asked.id}, *references, user]
    respond(server, tools=TOOLS, input=whole)
    assert prompt_text(server) == by_id


def test_what_is_not_kept_is_told_with_the_remedy(server: RunningServer) -> None:
    unkept = respond(server, store=False, max_output_tokens=2)
    assert unkept["store"] is False
    kept = respond(server, max_output_tokens=2)
    for response_id, item_id in (("resp-x", "msg_x"), (unkept["id"], unkept["output"][0]["id"])):
        error = server.error(PATH, 404, input="hi", previous_response_id=response_id)
        assert error["param"] == "previous_response_id" and "as input" in error["message"]
        error = server.error(PATH, 404, input=[{"type": "item_reference", "id": item_id}])
        assert error["param"] == "input" and "store = false" in error["message"]
    reference = [{"type": "item_reference", "id": kept["output"][0]["id"]}]
    respond(server, input=reference, max_output_tokens=1)
    assert server.client.post("/flush_cache").status_code == 200
    server.error(PATH, 404, input=reference)
    server.error(PATH, 404, input="hi", previous_response_id=kept["id"])
    assert server.context.responses.num_bytes == 0
    error = server.client.get(f"{PATH}/{kept['id']}").json()["error"]
    assert error["param"] == "response_id" and "unless store is false" in error["message"]


@pytest.mark.parametrize("streams", [False, True])
def test_a_kept_response_is_read_and_deleted(server: RunningServer, streams: bool) -> None:
    server.engine.script = lambda _: server.ids(EVERYTHING)
    responses = server.openai.responses
    body = {"tools": TOOLS, "metadata": {"a": "b"}, "instructions": "Be kind."}
    first = events_of(server, **body)[-1]["response"] if streams else respond(server, **body)
    assert responses.retrieve(first["id"]).to_dict() == first
    by_id = respond(server, input="And now?", previous_response_id=first["id"])
    assert server.client.delete(f"{PATH}/{first['id']}").json() == {
        "id": first["id"],
        "object": "response",
        "deleted": True,
    }
    for look in (responses.retrieve, responses.delete, responses.input_items.list):
        with pytest.raises(openai.NotFoundError):
            look(first["id"])
    server.error(PATH, 404, input=[{"id": first["output"][0]["id"]}])
    server.error(PATH, 404, input="hi", previous_response_id=first["id"])
    # What went on from it has its own copy.
    assert len(list(responses.input_items.list(by_id["id"]))) == len(first["output"]) + 2
    responses.delete(by_id["id"])


def test_input_items_have_openais_form(server: RunningServer) -> None:
    given = [
        {"role": "developer", "content": "Be kind."},
        {"role": "user", "content": [{"type": "text", "text": "hi"}], "id": "msg_own"},
        {"type": "reasoning", "summary": [{"type": "summary_text", "text": "Hm."}]},
        {"type": "message", "role": "assistant", "content": "I add."},
        {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c", "output": "2"},
        {"role": "assistant", "content": [{"type": "refusal", "refusal": "No."}]},
    ]
    kept = respond(server, input=given, tools=TOOLS, max_output_tokens=2)
    listed = server.openai.responses.input_items.list(kept["id"], order="asc").data
    for one in listed:
        TypeAdapter(ResponseItem).validate_python(one.to_dict(), strict=True)
    assert len({one.id for one in listed}) == len(given) and listed[1].id == "msg_own"
    assert [getattr(one, "role", one.type) for one in listed] == [
        one.get("role", one.get("type")) for one in given
    ]
    prompt = prompt_text(server)
    items = [one.to_dict() for one in listed]
    respond(server, input=items, tools=TOOLS, max_output_tokens=2)
    assert prompt_text(server) == prompt and listed[2].summary[0].text == "Hm."


def test_pages_of_input_items(server: RunningServer) -> None:
    given = [{"role": "user", "content": str(number)} for number in range(25)]
    kept = respond(server, input=given, max_output_tokens=2)
    items = server.openai.responses.input_items

    def texts(page: Iterable) -> list[int]:
        return [int(one.content[0].text) for one in page]

    newest = items.list(kept["id"])
    assert texts(newest.data) == list(range(24, 4, -1)) and newest.has_more
    assert texts(items.list(kept["id"], limit=7)) == list(range(24, -1, -1))
    oldest = items.list(kept["id"], order="asc", limit=2).data
    second = items.list(kept["id"], order="asc", limit=100, after=oldest[1].id)
    assert texts(second.data) == list(range(2, 25)) and not second.has_more
    path = f"{PATH}/{kept['id']}/input_items"
    last = server.client.get(path, params={"after": oldest[0].id}).json()
    assert (last["data"], last["first_id"], last["last_id"]) == ([], None, None)


@pytest.mark.parametrize(
    ("what", "param"),
    [
        ("/input_items?limit=0", "limit"),
        ("/input_items?limit=101", "limit"),
        ("/input_items?limit=x", "limit"),
        ("/input_items?order=up", "order"),
        ("/input_items?after=msg_x", "after"),
        ("/input_items?include[]=message.output_text.logprobs", "include"),
        ("?include[]=message.output_text.logprobs", "include"),
        ("?include=x", "include"),
        ("?stream=true", "stream"),
    ],
)
def test_what_is_asked_of_a_kept_response_is_checked(
    server: RunningServer, what: str, param: str
) -> None:
    kept = respond(server, max_output_tokens=2)
    response = server.client.get(f"{PATH}/{kept['id']}{what}")
    assert response.status_code == 400 and response.json()["error"]["param"] == param


def test_responses_are_kept_for_the_key_that_asked(
    start_server: Callable[..., RunningServer],
) -> None:
    server = start_server(api_key=["one", "two"])

    def asked(key: str, **body: object) -> httpx.Response:
        headers = {"authorization": f"Bearer {key}"}
        body = {"input": "hi", "max_output_tokens": 2, **body}
        return server.client.post(PATH, json=body, headers=headers)

    first = asked("one").json()
    path = f"{PATH}/{first['id']}"
    for method, at in (("GET", path), ("GET", f"{path}/input_items"), ("DELETE", path)):
        headers = {"authorization": "Bearer two"}
        assert server.client.request(method, at, headers=headers).status_code == 404
    reference = [{"type": "item_reference", "id": first["output"][0]["id"]}]
    for key, status in (("one", 200), ("two", 404)):
        assert asked(key, previous_response_id=first["id"]).status_code == status
        assert asked(key, input=reference).status_code == status


def test_a_kept_conversation_is_as_large_as_a_body(
    start_server: Callable[..., RunningServer],
) -> None:
    server = start_server(max_body_bytes=1024)
    first = respond(server, input="x" * 600, max_output_tokens=2)
    error = server.error(PATH, input="y" * 600, previous_response_id=first["id"])
    assert "a request may have 1024" in error["message"]
