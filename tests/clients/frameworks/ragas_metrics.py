"""ragas: a metric of two values, and faithfulness, which asks for statements and verdicts."""

import asyncio
import json
import sys
from importlib.metadata import requires

from openai import AsyncOpenAI
from playing import MODEL, SCRIPTED, played, print_versions
from ragas.llms import llm_factory
from ragas.metrics import DiscreteMetric
from ragas.metrics.collections import Faithfulness

client = AsyncOpenAI(base_url=f"{SCRIPTED}/v1", api_key="unused", max_retries=0)
llm = llm_factory(MODEL, client=client)


async def main() -> None:
    """Each metric in an event loop of its own would lose the client's connections."""
    metric = DiscreteMetric(
        name="is_right", prompt="Is this right? {response}", allowed_values=["pass", "fail"]
    )
    answer = json.dumps({"value": "pass", "reason": "It adds."})
    result = await metric.ascore(llm=llm, response=played(answer))
    assert (result.value, result.reason) == ("pass", "It adds."), result

    statements = ["Tom has 7 apples.", "Tom has 8 pears."]
    verdicts = [
        {"statement": text, "reason": "r", "verdict": verdict}
        for text, verdict in zip(statements, (1, 0), strict=True)
    ]
    asked = played(json.dumps({"statements": statements}), json.dumps({"statements": verdicts}))
    context = f"Tom has 7 apples. {asked}"
    result = await Faithfulness(llm=llm).ascore(
        user_input=asked, response="Tom has 7 apples and 8 pears.", retrieved_contexts=[context]
    )
    assert result.value == 0.5, result


asyncio.run(main())
# It imports what langchain-community has only below 0.4, and takes any version.
assert "langchain_community.chat_models.vertexai" in sys.modules
assert "langchain-community" in (requires("ragas") or ())
print_versions("ragas", "langchain-community")
