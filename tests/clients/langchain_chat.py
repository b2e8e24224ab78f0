"""LangChain's models for OpenAI and Anthropic; argv[1] is the server's address."""

import importlib.metadata
import sys

from langchain_anthropic import ChatAnthropic
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def add(a: int) -> int:
    """Adds."""
    return a


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
for name in ("langchain-core", "langchain-openai", "langchain-anthropic"):
    print(name, importlib.metadata.version(name))
