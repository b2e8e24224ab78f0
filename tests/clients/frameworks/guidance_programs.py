"""guidance: its models for OpenAI, SGLang and vLLM: text, JSON, patterns, choices."""

import re

import openai
from guidance import assistant, gen, json, select, system, user
from guidance.models import Model, OpenAI
from guidance.models.experimental import SglangModel, VLLMModel
from playing import EMBEDDED, MODEL, print_versions
from pydantic import BaseModel, ConfigDict, Field

QUESTION = "Tom has 3 apples and buys 4 more. How many?"
settings = {"base_url": f"{EMBEDDED}/v1", "api_key": "unused", "echo": False}


class Sum(BaseModel):
    """What the answer holds; guidance calls it strict, which wants no other properties."""

    model_config = ConfigDict(extra="forbid")
    apples: int = Field(ge=0, le=99)
    is_enough: bool


def asked(model: Model, node: object) -> Model:
    """The model after one answer."""
    with system():
        model += "Be brief."
    with user():
        model += QUESTION
    with assistant():
        return model + node


model = asked(OpenAI(MODEL, **settings), gen(name="text", max_tokens=512, temperature=0.01))
assert model["text"].strip()
with user():
    model += "And 5 more?"
with assistant():
    model += json(name="form", schema=Sum)
assert isinstance(Sum.model_validate_json(model["form"]), Sum)

model = asked(SglangModel(MODEL, **settings), gen("text", max_tokens=512, temperature=0.01))
assert model["text"].strip()
form = asked(SglangModel(MODEL, **settings), json("form", schema=Sum))["form"]
assert isinstance(Sum.model_validate_json(form), Sum)

for model in (SglangModel(MODEL, **settings), VLLMModel(MODEL, **settings)):
    text = asked(model, gen("text", regex="[0-9]{2} apples"))["text"]
    assert re.fullmatch("[0-9]{2} apples", text), text
    word = asked(model, "The answer is " + select(["yes", "no"], name="word"))["word"]
    assert word in ("yes", "no")
for node in (gen("text", max_tokens=5), gen("text", regex="[a-z]+", stop="q")):
    try:
        asked(model, node)
        raise AssertionError("attributes of llguidance's rules were read")
    except openai.BadRequestError as error:
        assert "attributes of a rule" in error.message
print_versions("guidance", "openai")
