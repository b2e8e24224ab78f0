"""Templates with the features that published ones use, as transformers renders them.

The published ones are compared by `python -m bench.template_check FOLDER`.
"""

from __future__ import annotations

import pytest
from bench.template_check import compare, conversations

from openspec.text.parsers.message import AnswerForm
from openspec.text.tokenizer import Tokenizer
from tests.unit.toy_tokenizer import toy_tokenizer

# Llama's: the date, tools with indents in the first user message, one call per message.
LLAMA = """\
{{- bos_token }}
{%- if not tools_in_user_message is defined %}
    {%- set tools_in_user_message = true %}
{%- endif %}
{%- if strftime_now is defined %}{%- set today = strftime_now("%d %b %Y") %}
{%- else %}{%- set today = "none" %}{%- endif %}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'] | trim %}
    {%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|head|>system\\n\\nToday: " + today + "\\n" }}
{%- if tools is not none and not tools_in_user_message %}
    {%- for t in tools %}{{- t | tojson(indent=4) }}{{- "\\n" }}{%- endfor %}
{%- endif %}
{{- system }}{{- "<|eot_id|>" }}
{%- if tools_in_user_message and not tools is none %}
    {%- if messages | length != 0 %}
        {%- set first = messages[0]['content'] | trim %}
        {%- set messages = messages[1:] %}
    {%- else %}{{- raise_exception("No user message to put tools in") }}{%- endif %}
    {{- '<|head|>user\\n' }}{%- for t in tools %}{{- t | tojson(indent=4) }}{%- endfor %}
    {{- first + "<|eot_id|>" }}
{%- endif %}
{%- for message in messages %}
    {%- if not (message.role == 'ipython' or message.role == 'tool' or 'tool_calls' in message) %}
        {{- '<|head|>' + message['role'] + '\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
    {%- elif 'tool_calls' in message %}
        {%- if not message.tool_calls | length == 1 %}
            {{- raise_exception("only single tool-calls at once") }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '<|head|>assistant\\n{"name": "' + call.name + '", "parameters": ' }}
        {{- call.arguments | tojson }}{{- "}<|eot_id|>" }}
    {%- elif message.role in ["tool", "ipython"] %}
        {{- "<|head|>ipython\\n" }}
        {%- if message.content is mapping or message.content is iterable %}
            {{- message.content | tojson }}
        {%- else %}{{- message.content }}{%- endif %}
        {{- "<|eot_id|>" }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|head|>assistant\\n\\n' }}{%- endif %}
{#- <|python_tag|> #}
"""
# Mistral's: filters with tests, dict.items, slices, ids of nine characters.
MISTRAL = """\
{%- if messages[0]["role"] == "system" %}{%- set loop_messages = messages[1:] %}
{%- else %}{%- set loop_messages = messages %}{%- endif %}
{%- set users = loop_messages | selectattr("role", "equalto", "user") | list %}
{%- set ns = namespace(index=0) %}
{%- for m in loop_messages | rejectattr("role", "equalto", "tool") | rejectattr("tool_calls") %}
    {%- if (m["role"] == "user") != (ns.index % 2 == 0) %}
        {{- raise_exception("roles must alternate") }}
    {%- endif %}
    {%- set ns.index = ns.index + 1 %}
{%- endfor %}
{{- bos_token }}
{%- for message in loop_messages %}
    {%- if message["role"] == "user" %}
        {%- if tools is not none and (message == users[-1]) %}
            {{- "[AVAILABLE_TOOLS] [" }}
            {%- for tool in tools %}{%- set tool = tool.function %}
                {%- for key, val in tool.items() if key != "return" %}
                    {%- if val is string %}{{- '"' + key + '": "' + val + '"' }}
                    {%- else %}{{- '"' + key + '": ' + val | tojson }}{%- endif %}
                    {%- if not loop.last %}{{- ", " }}{%- endif %}
                {%- endfor %}
            {%- endfor %}
            {{- "][/AVAILABLE_TOOLS]" }}
        {%- endif %}
        {{- "[INST] " + message["content"] + "[/INST]" }}
    {%- elif message.tool_calls is defined and message.tool_calls is not none %}
        {{- "[TOOL_CALLS] [" }}
        {%- for call in message.tool_calls %}
            {%- set out = call.function | tojson %}{{- out[:-1] }}
            {%- if not call.id is defined or call.id | length != 9 %}
                {{- raise_exception("ids have length 9") }}
            {%- endif %}
            {{- ', "id": "' + call.id + '"}' }}{{- ", " if not loop.last else "]" + eos_token }}
        {%- endfor %}
    {%- elif message["role"] == "assistant" %}{{- " " + message["content"] + eos_token }}
    {%- elif message["role"] == "tool" %}
        {%- set content = message.content | string %}
        {{- '[TOOL_RESULTS] {"content": ' + content + "}[/TOOL_RESULTS]" }}
    {%- else %}{{- raise_exception("unknown role") }}{%- endif %}
{%- endfor %}
"""
# Qwen's and Qwen3-Coder's: a system of its own, macros, reversed loops, keys of mappings, previtem
# and nextitem, splitting of thinking.
QWEN = """\
{% macro listed(items, tag='required') %}
    {%- if items is defined and items is iterable and items is not string and items | length > 0 %}
        {{- '\\n<' ~ tag ~ '>' -}}
        {%- for item in items -%}{%- if loop.index > 1 %}, {% endif -%}
            {%- if item is string -%}{{ "`" ~ item ~ "`" }}{%- else -%}{{ item }}{%- endif -%}
        {%- endfor -%}
        {{- '</' ~ tag ~ '>' -}}
    {%- endif %}
{% endmacro %}
{%- set ns = namespace(is_last=true, last=messages | length - 1) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages | length - 1) - loop.index0 %}
    {%- if ns.is_last and message.role == "user" and not message.content.startswith('<tool') %}
        {%- set ns.is_last = false %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- if messages[0].role == 'system' %}{{- '<|im_start|>system\\n' + messages[0].content }}
{%- else %}{{- '<|im_start|>system\\nYou are a small test.' }}{%- endif %}
{%- for tool in tools or [] %}
    {%- set tool = tool.function %}
    {{- "\\n<function>" ~ tool.name ~ (tool.description | trim) }}
    {%- for name, fields in tool.parameters.properties | items %}
        {{- '\\n<name>' ~ name ~ '</name><type>' ~ (fields.type | string) ~ '</type>' }}
        {{- listed(fields.get('enum', []), 'enum') }}
        {%- for key, value in fields.items() if key not in ['type', 'enum'] %}
            {{- '<' ~ (key | replace("-", "_")) ~ '>' }}
            {{- (value | tojson | safe) if value is mapping else (value | string) }}
        {%- endfor %}
        {%- for key in fields if key not in ['type', 'enum'] %}
            {%- set value, is_text = fields[key], fields[key] is string %}
            {{- key ~ (value | tojson | safe if value is sequence and not is_text else value) }}
        {%- endfor %}
    {%- endfor %}
    {{- listed(tool.parameters.required) }}
{%- endfor %}
{{- '<|im_end|>\\n' }}
{%- for message in messages %}
    {%- if message.role == "user" or (message.role == "system" and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- elif message.role == "assistant" %}
        {%- set content, reasoning = message.content, '' %}
        {%- if message.reasoning_content is defined and message.reasoning_content is not none %}
            {%- set reasoning = message.reasoning_content %}
        {%- elif '</think>' in content %}
            {%- set reasoning = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1] %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.index0 > ns.last and (loop.last or reasoning) %}
            {{- '<think>\\n' + reasoning.strip('\\n') + '\\n</think>\\n\\n' }}
        {%- endif %}
        {{- content.lstrip('\\n') }}
        {%- for call in message.tool_calls or [] %}
            {%- if call.function %}{%- set call = call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n<function=' + call.name + '>\\n' }}
            {%- for name, value in call.arguments | items %}
                {%- set value = value if value is string else value | string %}
                {{- '<parameter=' + name + '>\\n' + value + '\\n</parameter>\\n' }}
            {%- endfor %}
            {{- '</function>\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == "tool" %}
        {%- if loop.first or (loop.previtem and loop.previtem.role != "tool") %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or loop.nextitem.role != "tool" %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
# DeepSeek's: state in a namespace, tokens of other brackets, thinking opened in the prompt.
DEEPSEEK = """\
{% if not add_generation_prompt is defined %}{% set add_generation_prompt = false %}{% endif %}
{% set ns = namespace(is_first=false, is_tool=false, system='') %}
{%- for message in messages %}{%- if message['role'] == 'system' %}
{% set ns.system = message['content'] %}{%- endif %}{%- endfor %}{{bos_token}}{{ns.system}}
{%- for message in messages %}
{%- if message['role'] == 'user' %}{%- set ns.is_tool = false -%}
{{'<\uff5cUser\uff5c>' + message['content']}}{%- endif %}
{%- if message['role'] == 'assistant' and not message.tool_calls %}
{% set content = message['content'] %}{% if '</think>' in content %}
{% set content = content.split('</think>')[-1] %}{% endif %}
{{'<\uff5cAssistant\uff5c>' + content + '<\uff5cend\u2581of\u2581sentence\uff5c>'}}{%- endif %}
{%- if message['role'] == 'tool' %}{%- set ns.is_tool = true -%}
{{'<\uff5ctool\u2581output\uff5c>' + message['content']}}{%- endif %}
{%- endfor -%}
{% if add_generation_prompt and not ns.is_tool %}{{'<\uff5cAssistant\uff5c><think>\\n'}}{% endif %}
"""
FAMILIES = {"llama": LLAMA, "mistral": MISTRAL, "qwen": QWEN, "deepseek": DEEPSEEK}


@pytest.mark.parametrize("family", FAMILIES)
def test_rendered_as_transformers_does(family: str) -> None:
    cases = conversations()
    outcome = compare(FAMILIES[family], cases)
    assert not outcome.different
    assert outcome.num_equal >= 15 and outcome.num_equal + outcome.num_refused == len(cases)


def test_a_difference_is_found() -> None:
    # What a user's text spells is text here and a special token there.
    outcome = compare("{{ '<|this|>' in messages[-1].content }}", conversations())
    assert outcome.different[:2] == ["turns", "turns without prompt"]


@pytest.mark.parametrize(
    ("template", "calls", "reasoning"),
    [
        (LLAMA, "llama3_json", "qwen3"),
        (MISTRAL, "mistral", "qwen3"),
        (QWEN, "qwen3_coder", "qwen3"),
        (QWEN.replace("<function=", "<f="), "hermes", "qwen3"),
        (DEEPSEEK, "hermes", "deepseek_r1"),
        ("{{ messages }}", "hermes", "qwen3"),
    ],
)
def test_the_form_of_answers(template: str, calls: str, reasoning: str) -> None:
    tokenizer: Tokenizer = toy_tokenizer()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tokenizer.chat_templates, "sources", {"default": template})
        form = AnswerForm.of(tokenizer, "auto", "auto")
        assert (form.calls, form.reasoning) == (calls, reasoning)
        form = AnswerForm.of(tokenizer, "mistral", "qwen3")
        assert (form.calls, form.reasoning) == ("mistral", "qwen3")
