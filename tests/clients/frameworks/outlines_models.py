"""Outlines over the interfaces of OpenAI, vLLM and SGLang: JSON, choices, patterns, grammars."""

import json
import re
from typing import Literal

import openai
import outlines
from outlines import grammars
from outlines.inputs import Chat
from outlines.types import CFG, Regex
from playing import EMBEDDED, MODEL, print_versions
from pydantic import BaseModel, Field

TEXT = "Tom has 3 apples and buys 4 more. How many?"
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
SELECT = 'start: "SELECT " NAME ("," NAME)~0..2\nNAME: /[a-z]{1,5}/\n'
client = openai.OpenAI(base_url=f"{EMBEDDED}/v1", api_key="unused", max_retries=0)


class Sum(BaseModel):
    """What the answer holds."""

    apples: int = Field(ge=0, le=99)
    is_enough: bool


def is_sum(text: str) -> bool:
    """Whether a text is the JSON that `Sum` asks for."""
    return isinstance(Sum.model_validate_json(text), Sum)


for make in (outlines.from_openai, outlines.from_vllm, outlines.from_sglang):
    model = make(client, MODEL)
    options = {"temperature": 0, "max_tokens": 96, "extra_body": OFF}
    chat = Chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": TEXT}])
    whole = model(chat, **options)
    assert "".join(model.stream(chat, **options)) == whole != ""
    assert is_sum(model(TEXT, Sum, **options))
    assert is_sum("".join(model.stream(TEXT, Sum, **options)))
    assert len(model(TEXT, Sum, n=2, **options)) == 2

for make in (outlines.from_vllm, outlines.from_sglang):
    model = make(client, MODEL)
    options = {"temperature": 0, "max_tokens": 96, "extra_body": OFF}
    assert model(TEXT, Literal["yes", "no"], **options) in ("yes", "no")
    assert model(TEXT, Regex("[0-9]{2} apples"), **options)[2:] == " apples"
    assert re.fullmatch("[+-]?[0-9]+", model(TEXT, int, **options))
    json.loads(model(TEXT, dict, **options))
    query = model(TEXT, CFG(SELECT), **options)
    assert re.fullmatch(r"SELECT [a-z]{1,5}(,[a-z]{1,5}){0,2}", query), query
    sum_of = model(TEXT, CFG(grammars.arithmetic), **options)
    assert re.fullmatch(r"[-+*/().\d\s]+", sum_of), sum_of
print_versions("outlines", "openai")
