"""LiteLLM's SDK over chat and messages; argv[1] is the server's address."""

import importlib.metadata
import os
import sys

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else it downloads a list of prices

import litellm

litellm.suppress_debug_info = True
base = sys.argv[1]
messages = [{"role": "user", "content": "Tom has 3 apples and buys 4 more. How many?"}]
options = {"messages": messages, "max_tokens": 512, "temperature": 0, "api_key": "unused"}
for model, address in (("openai/tiny", f"{base}/v1"), ("anthropic/tiny", base)):
    whole = litellm.completion(model=model, api_base=address, **options)
    assert whole.usage.completion_tokens > 0
    chunks = list(litellm.completion(model=model, api_base=address, stream=True, **options))
    streamed = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert streamed == (whole.choices[0].message.content or "")
print("litellm", importlib.metadata.version("litellm"))
