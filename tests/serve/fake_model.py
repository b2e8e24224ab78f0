"""A model folder without weights: a small byte-level tokenizer, a chat template, the configs."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
PLAIN_ADDED = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
THINKING = ["<think>", "</think>"]
MAX_POSITIONS = 2048

CORPUS = """the quick brown fox jumps over the lazy dog. one two three four five six seven eight.
What is the answer? The answer is 42. Let me think about it. {"name": "add", "arguments": {"a": 1}}
def add(first, second): return first + second
import json; print(json.dumps({"key": [1, 2, 3]})) # naïve café «quotes» 😀 日本語
"""

TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\nTools:\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' + (tool | tojson) }}{%- endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- set content = message.content if message.content is string else '' %}
{{- '<|im_start|>' + message.role + '\\n' + content }}
{%- if message.tool_calls %}
{%- for call in message.tool_calls %}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
{%- if call.function.arguments is string %}{{- call.function.arguments }}
{%- else %}{{- call.function.arguments | tojson }}{%- endif %}
{{- '}\\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
{{- '<|im_start|>assistant\\n' }}
{%- if enable_thinking is defined and enable_thinking is false %}
{{- '<think>\\n\\n</think>\\n\\n' }}
{%- endif %}
{%- endif %}
"""


def write_fake_model(folder: Path, generation_config: dict | None = None) -> Path:
    """Fills `folder`; the vocabulary has a few hundred tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=[],
        show_progress=False,
    )
    tokenizer.train_from_iterator([CORPUS] * 3, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in PLAIN_ADDED + THINKING])
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {text: tokenizer.token_to_id(text) for text in SPECIAL + PLAIN_ADDED + THINKING}
    tokenizer_config = {
        "tokenizer_class": "Qwen2Tokenizer",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": MAX_POSITIONS,
        "added_tokens_decoder": {
            str(token_id): {"content": text, "special": text in SPECIAL}
            for text, token_id in ids.items()
        },
        "chat_template": TEMPLATE,
    }
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "intermediate_size": 128,
        "vocab_size": vocab_size(tokenizer),
        "max_position_embeddings": MAX_POSITIONS,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_id": ids["<|im_end|>"],
    }
    eos = [ids["<|im_end|>"], ids["<|endoftext|>"]]
    defaults = {"eos_token_id": eos, "temperature": 0.6, "top_k": 20, "top_p": 0.95}
    for name, value in (
        ("tokenizer_config.json", tokenizer_config),
        ("config.json", config),
        ("generation_config.json", defaults if generation_config is None else generation_config),
    ):
        (folder / name).write_text(json.dumps(value))
    return folder


def vocab_size(tokenizer: Tokenizer) -> int:
    """Rounded up, so that some rows stand for no token, as in real checkpoints."""
    return (tokenizer.get_vocab_size() // 64 + 1) * 64
