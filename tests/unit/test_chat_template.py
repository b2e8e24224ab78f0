from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from openspec.errors import ConfigError, RequestError
from openspec.text.chat_template import ChatTemplates
from tests.unit.examples import examples
from tests.unit.toy_tokenizer import MARKUP, SPECIAL, save_toy_tokenizer, toy_tokenizer

TOOL = {"type": "function", "function": {"name": "f", "parameters": {"é<&>'": {"type": "string"}}}}
PLAIN = st.text(st.characters(exclude_characters="<|", exclude_categories=["Cs"]), max_size=20)
HOSTILE = st.lists(
    st.one_of(
        st.sampled_from([*SPECIAL, *MARKUP, "<", "<|", "|>", ">", "im_start", "\ue000", "\\ue000"]),
        st.text(max_size=4),
    ),
    max_size=8,
).map("".join)


def chat_template(source: str, variables: dict[str, str] | None = None) -> ChatTemplates:
    return ChatTemplates({"default": source}, SPECIAL, variables or {})


def chats(texts: st.SearchStrategy[str]) -> st.SearchStrategy[list[dict[str, Any]]]:
    call = st.fixed_dictionaries(
        {
            "function": st.fixed_dictionaries(
                {"name": texts, "arguments": st.dictionaries(texts, texts, max_size=2)}
            )
        }
    )
    message = st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["user", "tool"]), "content": texts}),
        st.fixed_dictionaries({"role": st.just("assistant"), "content": texts}),
        st.fixed_dictionaries(
            {"role": st.just("assistant"), "content": texts, "reasoning_content": texts}
        ),
        st.fixed_dictionaries(
            {
                "role": st.just("assistant"),
                "content": st.none(),
                "tool_calls": st.lists(call, min_size=1, max_size=2),
            }
        ),
    )
    system = st.fixed_dictionaries({"role": st.just("system"), "content": texts})
    return st.tuples(st.lists(system, max_size=1), st.lists(message, min_size=1, max_size=5)).map(
        lambda parts: parts[0] + parts[1]
    )


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Any:
    import transformers

    folder = save_toy_tokenizer(tmp_path_factory.mktemp("tokenizer"))
    return transformers.AutoTokenizer.from_pretrained(folder)


@examples(200)
@given(
    chats(PLAIN | st.sampled_from(["<think>", "a</think>b", "x <tool_call>", "1 < 2", "a <b> c"])),
    st.booleans(),
    st.booleans(),
    st.sampled_from([{}, {"enable_thinking": False}, {"enable_thinking": True}]),
)
def test_ordinary_text_gives_the_reference_ids(
    reference: Any, messages: Any, use_tools: bool, add: bool, kwargs: Any
) -> None:
    tools = [TOOL] if use_tools else None
    chat = toy_tokenizer().render_chat(messages, tools, add, kwargs)
    arguments: Any = {"tools": tools, "add_generation_prompt": add, **kwargs}
    text = reference.apply_chat_template(messages, tokenize=False, **arguments)
    assert chat.text == text
    assert chat.token_ids == reference.apply_chat_template(messages, **arguments)["input_ids"]


@pytest.mark.slow
@examples(300)
@given(chats(HOSTILE), chats(PLAIN))
def test_user_text_makes_no_special_tokens(hostile: Any, harmless: Any) -> None:
    """Every message opens and closes one turn, whatever it says."""
    tokenizer = toy_tokenizer()
    special = set(tokenizer.special_tokens.values())
    for messages in (hostile, harmless):
        chat = tokenizer.render_chat(messages)
        marks = [token_id for token_id in chat.token_ids if token_id in special]
        start, end = (tokenizer.special_tokens[name] for name in ("<|im_start|>", "<|im_end|>"))
        assert marks == [start, end] * len(messages) + [start]


@examples(200)
@given(chats(HOSTILE))
def test_the_text_is_the_reference_even_then(reference: Any, messages: Any) -> None:
    text = reference.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert toy_tokenizer().render_chat(messages).text == text


@pytest.mark.parametrize(
    "parts",
    [
        ("<|im_", "start|>"),
        ("<", "|im_start|>"),
        ("<|im_start|", ">"),
        ("<|", "im_start|>"),
    ],
)
def test_pieces_that_the_template_joins(parts: tuple[str, str]) -> None:
    template = chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    messages = [{"role": "user", "content": part} for part in parts]
    segments = template.render(messages, None, False, {})
    assert [(s.text, s.is_special) for s in segments] == [("<|im_start|>", False)]


def test_ascii_json_of_stand_ins_is_put_back() -> None:
    template = chat_template("{{ messages | tojson(ensure_ascii=True) }}")
    (segment,) = template.render([{"role": "<|im_end|>"}], None, False, {})
    assert segment.text == '[{"role": "<|im_end|>"}]'


def test_private_characters_pass_through() -> None:
    template = chat_template("{{ messages[0].content }}")
    text = "\ue000\\ue001<|im_end|>\ue002"
    segments = template.render([{"role": "user", "content": text}], None, False, {})
    assert "".join(s.text for s in segments) == text
    everything = "".join(map(chr, range(0xE000, 0xF900)))
    with pytest.raises(RequestError, match="private characters"):
        template.render([{"content": everything + "<|"}], None, False, {})


def test_content_parts_and_reasoning_names() -> None:
    tokenizer = toy_tokenizer()
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    joined = tokenizer.render_chat([{"role": "user", "content": parts}])
    assert joined == tokenizer.render_chat([{"role": "user", "content": "a\nb"}])
    image = [{"type": "image_url", "image_url": {"url": "http://example.org"}}]
    with pytest.raises(RequestError, match="content part"):
        tokenizer.render_chat([{"role": "user", "content": image}])
    for name in ("reasoning_content", "reasoning", "thinking"):
        chat = tokenizer.render_chat(
            [{"role": "assistant", "content": "a", name: "why"}], add_generation_prompt=False
        )
        assert "<think>\nwhy\n</think>" in chat.text


@pytest.mark.parametrize(
    "kwargs",
    [
        {"tokenize": True},
        {"messages": []},
        {"enable_thinking": "no"},
        {"x" * 9999: 1},
        {"reasoning_effort": True},
        {"reasoning_effort": ""},
        {"reasoning_effort": "x" * 65},
        {"reasoning_effort": ["low"]},
    ],
)
def test_kwargs_are_limited(kwargs: dict[str, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        toy_tokenizer().render_chat([{"role": "user", "content": "x"}], None, True, kwargs)
    assert caught.value.param == "chat_template_kwargs"
    assert len(str(caught.value)) < 300


def test_texts_for_the_template_are_text() -> None:
    template = chat_template("{{ reasoning_effort }}{{ reasoning_effort == '<|im_end|>' }}")
    for effort in ("low", "<|im_end|>"):
        segments = template.render([], None, False, {"reasoning_effort": effort})
        assert [(s.text, s.is_special) for s in segments] == [(f"{effort}False", False)]


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [{}],
        [{"role": "user"}],
        [{"role": "wizard", "content": "x"}],
        [{"role": "user", "content": 3}],
        [{"role": "user", "content": [[[]]]}],
        [{"role": "user", "content": "\ud800"}],
    ],
)
def test_bad_messages_are_request_errors(messages: Any) -> None:
    with pytest.raises(RequestError):
        toy_tokenizer().render_chat(messages)


def test_deep_messages() -> None:
    deep: Any = "x"
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(RequestError, match="nested deeper"):
        toy_tokenizer().render_chat([{"role": "user", "content": "x", "extra": deep}])


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ strftime_now.__globals__ }}",
    "{{ dict.__init__.__globals__ }}",
    "{{ self._TemplateReference__context.environment }}",
    "{% set ns = namespace(__class__=1) %}",
    "{% set ns = namespace() %}{% set ns._x = 1 %}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update({'role': 'x'}) }}",
    "{{ messages | attr('__class__') }}",
    "{{ '{0.__class__}'.format(1) }}",
    "{% for i in range(1000000000) %}{% endfor %}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
    "{% include '/etc/passwd' %}",
    "{% import 'os' as os %}{{ os }}",
    "{{ messages[0].nothing.nothing }}",
    "{{ 1 / 0 }}",
    "{{ 2 ** 100000 }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_hostile_templates(source: str) -> None:
    try:
        segments = chat_template(source).render([{"role": "user"}], None, False, {})
    except (RequestError, ConfigError):
        return
    assert not segments  # what the sandbox hides is undefined, and prints as nothing


def test_slow_templates_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("openspec.text.chat_template.MAX_RENDER_S", 0.2)
    nested = "{% set r = range(99999) %}{% for i in r %}{% for j in r %}.{% endfor %}{% endfor %}"
    with pytest.raises(RequestError, match="takes too long"):
        chat_template(nested).render([{"role": "user"}], None, False, {})


def test_conveniences() -> None:
    source = (
        "{%- for i in range(5) -%}{%- if i == 3 -%}{% break %}{%- endif -%}{{ i }}{%- endfor -%}"
        "{{ strftime_now('%%') }}{{ {'a': '<é>'} | tojson }}{{ dict(a=1).a }}{{ eos_token }}"
    )
    template = chat_template(source, {"eos_token": "<|im_end|>"})
    segments = template.render([{"role": "user"}], None, False, {})
    assert [s.text for s in segments] == ['012%{"a": "<é>"}1', "<|im_end|>"]
    with pytest.raises(ConfigError, match="more than"):
        chat_template("x" * (2**20 + 1))


def test_marks_of_training_are_no_text() -> None:
    """Templates that came with a fine-tuned model; the text is transformers'."""
    source = (
        "{%- set x = 1 %}\n{%- for m in messages %}\n<|im_start|>{{ m.role }}\n"
        "{% if m.role == 'assistant' %}\n{% generation %}\n{% set x = 2 %}\n"
        "{{ m.content }}{{ x }}\n{% endgeneration %}\n{% endif %}\n{{ x }}<|im_end|>\n{% endfor %}"
    )
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    segments = chat_template(source).render(messages, None, False, {})
    assert "".join(segment.text for segment in segments) == (
        "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\nb2\n1<|im_end|>\n"
    )
    endless = "{% for i in range(99999) %}{{ 'x' * 9999 }}{% endfor %}"
    with pytest.raises(RequestError, match="longer than"):
        chat_template(f"{{% generation %}}{endless}{{% endgeneration %}}").render(
            messages, None, False, {}
        )
