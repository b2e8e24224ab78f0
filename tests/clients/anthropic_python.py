"""anthropic for Python: messages, stream, tools, counting; argv[1] is the server's address."""

import sys

import anthropic

client = anthropic.Anthropic(base_url=sys.argv[1], api_key="unused", max_retries=0)
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many?"}]
schema = {"type": "object", "properties": {"a": {"type": "number"}}}
tools = [{"name": "add", "description": "Adds", "input_schema": schema}]
options = {"model": model, "messages": messages, "max_tokens": 512, "tools": tools}
# Newer versions of the library have no argument for it.
options["extra_body"] = {"temperature": 0}

whole = client.messages.create(**options)
kinds = []
with client.messages.stream(**options) as events:
    for event in events:
        kinds.append(event.type)
    final = events.get_final_message()
assert kinds[0] == "message_start"
assert kinds[-1] == "message_stop"
assert [block.type for block in final.content] == [block.type for block in whole.content]
texts = [[block.text for block in m.content if block.type == "text"] for m in (final, whole)]
assert texts[0] == texts[1]
assert final.stop_reason == whole.stop_reason
assert final.usage.output_tokens == whole.usage.output_tokens

counted = client.messages.count_tokens(model=model, messages=messages, tools=tools)
usage = whole.usage
assert counted.input_tokens == usage.input_tokens + usage.cache_read_input_tokens

call = {"type": "tool_use", "id": "toolu_1", "name": "add", "input": {"a": 1}}
result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": "7"}
turns = [
    *messages,
    {"role": "assistant", "content": [call]},
    {"role": "user", "content": [result]},
]
assert client.messages.create(**{**options, "messages": turns}).usage.output_tokens > 0
try:
    client.messages.create(**{**options, "model": "none"})
    raise AssertionError("a model that is not there was found")
except anthropic.NotFoundError as error:
    assert error.body["error"]["type"] == "not_found_error"
print("anthropic", anthropic.__version__)
