"""instructor: its modes over chat, responses and messages, whole and streamed."""

import enum
import warnings
from collections.abc import Iterable

import anthropic
import instructor
import openai
from forms import ANSWER, QUESTION, Sum
from instructor import Mode
from instructor.core import InstructorRetryException
from playing import EMBEDDED, MODEL, SCRIPTED, call, played, print_versions
from pydantic import BaseModel

warnings.simplefilter("ignore", DeprecationWarning)  # of names of modes


class Size(str, enum.Enum):
    SMALL = "small"


class Sized(BaseModel):
    """A model whose parts instructor refuses, see below."""

    size: Size


class Word(BaseModel):
    """One word."""

    word: str


def over_openai(mode: Mode, url: str = EMBEDDED) -> instructor.Instructor:
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0)
    return instructor.from_openai(client, mode=mode)


def over_anthropic(mode: Mode, url: str = EMBEDDED) -> instructor.Instructor:
    client = anthropic.Anthropic(base_url=url, api_key="unused", max_retries=0)
    return instructor.from_anthropic(client, mode=mode)


def user(text: str) -> dict:
    messages = [{"role": "user", "content": text}]
    return {"model": MODEL, "messages": messages, "max_tokens": 512, "max_retries": 0}


question = {**user(QUESTION), "extra_body": {"temperature": 0}}


def is_answer(found: Sum) -> bool:
    """Whether it is the answer above; instructor makes a class of its own from ours."""
    return isinstance(found, Sum) and found.model_dump() == ANSWER.model_dump()


as_json, as_call = ANSWER.model_dump_json(), call("Sum", apples=7, size="small")

# What the request enforces: the embedded model's object is the one that was asked for.
for client in (
    *map(over_openai, (Mode.TOOLS, Mode.TOOLS_STRICT, Mode.JSON_SCHEMA, Mode.RESPONSES_TOOLS)),
    *map(over_anthropic, (Mode.ANTHROPIC_TOOLS, Mode.ANTHROPIC_REASONING_TOOLS)),
):
    found, answered = client.create_with_completion(response_model=Sum, **question)
    assert isinstance(found, Sum), (client.mode, found)
    assert answered.usage is not None
    *_, last = client.create_partial(response_model=Sum, **question)
    assert last.model_dump() == found.model_dump(), (client.mode, last, found)
chosen = instructor.from_provider(f"openai/{MODEL}", base_url=f"{EMBEDDED}/v1", api_key="unused")
del question["model"]
assert isinstance(chosen.create(response_model=Sum, **question), Sum)

# What the model does by itself is played.
for mode, text in (
    (Mode.TOOLS, as_call),
    (Mode.JSON, as_json),
    (Mode.MD_JSON, f"Here it is.\n```json\n{as_json}\n```"),
):
    client = over_openai(mode, SCRIPTED)
    assert is_answer(client.create(response_model=Sum, **user(played(text)))), mode
    *_, last = client.create_partial(response_model=Sum, **user(played(text)))
    assert last.model_dump() == ANSWER.model_dump(), (mode, last)
client = over_anthropic(Mode.ANTHROPIC_JSON, SCRIPTED)
assert is_answer(client.create(response_model=Sum, **user(played(as_json))))
for mode in (Mode.TOOLS, Mode.TOOLS_STRICT):
    text = call("IterableSum", tasks=[ANSWER.model_dump()] * 2)
    many = over_openai(mode, SCRIPTED).create_iterable(response_model=Sum, **user(played(text)))
    assert [is_answer(one) for one in many] == [True, True], mode
text = f"{as_call}\n{call('Word', word='apple')}"
for client in (
    over_openai(Mode.PARALLEL_TOOLS, SCRIPTED),
    over_anthropic(Mode.ANTHROPIC_PARALLEL_TOOLS, SCRIPTED),
):
    first, second = client.create(response_model=Iterable[Sum | Word], **user(played(text)))
    assert is_answer(first) and second.word == "apple", (first, second)
# An object that instructor refuses is sent back with what is wrong, and asked for again.
text = played(call("Sum", apples=700, size="small"), as_call)
client = over_openai(Mode.TOOLS, SCRIPTED)
assert is_answer(client.create(response_model=Sum, **{**user(text), "max_retries": 1}))
# Its own fault: it refuses a part of a stream that holds an enumeration, and wants the enumeration
# itself, which no JSON can hold.
try:
    list(over_openai(Mode.TOOLS).create_partial(response_model=Sized, **user("A size")))
    raise SystemExit("instructor streams enumerations: change docs/clients.md")
except InstructorRetryException as error:
    assert "instance of Size" in str(error), error
print_versions("instructor", "openai", "anthropic")
