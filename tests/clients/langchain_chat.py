"""LangChain's models for OpenAI and Anthropic; argv[1] is the server's address."""

import importlib.metadata
import sys
from typing import Annotated

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from openai import LengthFinishReasonError
from pydantic import BaseModel, Field


@tool
def add(a: int) -> int:
    """Adds."""
    return a


@tool
def add_small(a: Annotated[int, Field(ge=0, le=99)]) -> int:
    """Adds."""
    return a


class Sum(BaseModel):
    """How many apples there are."""

    apples: int = Field(ge=0, le=99)
    is_enough: bool


base = sys.argv[1]
text = "Tom has 3 apples and buys 4 more. How many?"
openai = {"base_url": f"{base}/v1", "api_key": "unused", "max_tokens": 512, "temperature": 0}
for model in (
    ChatOpenAI(model="tiny", **openai),
    ChatOpenAI(model="tiny", use_responses_api=True, **openai),
    ChatAnthropic(model="tiny", base_url=base, api_key="unused", max_tokens=512, temperature=0),
):
    whole = model.bind_tools([add]).invoke(text)
    assert whole.usage_metadata["output_tokens"] > 0
    streamed = None
    for chunk in model.bind_tools([add]).stream(text):
        streamed = chunk if streamed is None else streamed + chunk
    assert streamed.text == whole.text
off = {"chat_template_kwargs": {"enable_thinking": False}}
model = ChatOpenAI(model="tiny", extra_body=off, **openai)
for method in ("function_calling", "json_schema"):
    answer = model.with_structured_output(Sum, method=method).invoke(text)
    assert isinstance(answer, Sum), (method, answer)
try:
    answer = model.with_structured_output(None, method="json_mode").invoke(text)
    assert isinstance(answer, dict), answer
except LengthFinishReasonError as error:  # the embedded model may find no end of an object
    assert error.completion.choices[0].message.content.lstrip().startswith("{")
caller = model.bind_tools([add_small], tool_choice="any", parallel_tool_calls=False)
(call,) = caller.invoke(text).tool_calls
assert call["name"] == "add_small"
assert isinstance(call["args"]["a"], int)
for name in ("langchain-core", "langchain-openai", "langchain-anthropic"):
    print(name, importlib.metadata.version(name))
