"""openai for Python: chat, stream, tools, parsed answers, responses; argv[1] is the address."""

import json
import sys

import openai
import pydantic
from pydantic import Field

client = openai.OpenAI(base_url=f"{sys.argv[1]}/v1", api_key="unused", max_retries=0)
model = client.models.list().data[0].id
messages = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many?"}]
parameters = {"type": "object", "properties": {"a": {"type": "number"}}}
function = {"name": "add", "description": "Adds", "parameters": parameters}
tools = [{"type": "function", "function": function}]
options = {"model": model, "messages": messages, "max_tokens": 512, "temperature": 0}

whole = client.chat.completions.create(**options, tools=tools)
assert whole.usage.completion_tokens > 0
with client.chat.completions.stream(**options, tools=tools) as events:
    kinds = {event.type for event in events}
    final = events.get_final_completion()
assert "chunk" in kinds
assert final.choices[0].message.content == whole.choices[0].message.content
try:
    client.chat.completions.create(**{**options, "model": "none"})
    raise AssertionError("a model that is not there was found")
except openai.NotFoundError:
    pass

tools = [{"type": "function", **function, "strict": False}]
options = {"model": model, "input": messages, "max_output_tokens": 512, "temperature": 0}
response = client.responses.create(**options, tools=tools)
with client.responses.stream(**options, tools=tools) as events:
    kinds = {event.type for event in events}
    final = events.get_final_response()
assert "response.created" in kinds
assert final.output_text == response.output_text
again = [*messages, *(item.to_dict() for item in response.output), messages[0]]
again = client.responses.create(**{**options, "input": again}, tools=tools)
assert again.usage.input_tokens > response.usage.input_tokens


class Sum(pydantic.BaseModel):
    """What the answer holds."""

    apples: int = Field(ge=0, le=99)
    is_enough: bool


off = {"chat_template_kwargs": {"enable_thinking": False}}
chat = {"model": model, "messages": messages, "max_tokens": 512, "temperature": 0}
parsed = client.chat.completions.parse(**chat, response_format=Sum, extra_body=off)
assert isinstance(parsed.choices[0].message.parsed, Sum)
tool = openai.pydantic_function_tool(Sum)
asked = {"tools": [tool], "tool_choice": "required", "parallel_tool_calls": False}
parsed = client.chat.completions.parse(**chat, **asked, extra_body=off)
assert isinstance(parsed.choices[0].message.tool_calls[0].function.parsed_arguments, Sum)
parsed = client.responses.parse(
    **{**options, "input": messages[:1]}, text_format=Sum, extra_body=off
)
assert isinstance(parsed.output_parsed, Sum)

# A conversation by the id of its last answer, and by the ids of its items.
question = {"role": "user", "content": "And 5 more?"}
short = {"model": model, "max_output_tokens": 64, "temperature": 0, **{"extra_body": off}}
first = client.responses.create(**short, input=messages)
whole = client.responses.create(
    **short, input=[*messages, *(item.to_dict() for item in first.output), question], store=False
)
by_id = client.responses.create(**short, input=[question], previous_response_id=first.id)
references = [{"type": "item_reference", "id": item.id} for item in first.output]
by_items = client.responses.create(**short, input=[*messages, *references, question])
assert by_id.output_text == by_items.output_text == whole.output_text
assert by_id.usage.input_tokens == by_items.usage.input_tokens == whole.usage.input_tokens
try:
    client.responses.create(**short, input=[question], previous_response_id=whole.id)
    raise AssertionError("an answer that is not stored was found")
except openai.NotFoundError as error:
    assert error.param == "previous_response_id"
assert client.responses.retrieve(by_id.id).output_text == by_id.output_text
listed = [item.type for item in client.responses.input_items.list(by_id.id, order="asc")]
assert listed == ["message", *(item.type for item in first.output), "message"]
client.responses.delete(by_id.id)
try:
    client.responses.retrieve(by_id.id)
    raise AssertionError("an answer that was deleted was found")
except openai.NotFoundError as error:
    assert error.param == "response_id"

# A call that must come beside the form of the last answer, as the Agents SDK asks for both.
loose = {**function, "strict": False}
parsed = client.chat.completions.create(
    **{**chat, "max_tokens": 128},
    tools=[{"type": "function", "function": loose}],
    tool_choice="required",
    parallel_tool_calls=False,
    response_format={"type": "json_object"},
    extra_body=off,
)
json.loads(parsed.choices[0].message.tool_calls[0].function.arguments)
print("openai", openai.__version__)
