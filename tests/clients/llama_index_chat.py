"""LlamaIndex's OpenAILike: chat and stream; argv[1] is the server's address."""

import importlib.metadata
import sys

from llama_index.core.llms import ChatMessage
from llama_index.llms.openai_like import OpenAILike

model = OpenAILike(
    model="tiny",
    api_base=f"{sys.argv[1]}/v1",
    api_key="unused",
    is_chat_model=True,
    max_tokens=512,
    temperature=0,
)
messages = [ChatMessage(role="user", content="Tom has 3 apples and buys 4 more. How many?")]
whole = model.chat(messages)
*_, last = model.stream_chat(messages)
assert (last.message.content or "") == (whole.message.content or "")
for name in ("llama-index-core", "llama-index-llms-openai-like"):
    print(name, importlib.metadata.version(name))
