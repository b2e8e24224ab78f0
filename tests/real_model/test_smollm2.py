"""A model that others trained: its files, its answers, and the same answers with drafts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from bench.measure.task_prompts import KINDS
from safetensors.torch import load_file
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from openspec import LLM, SamplingParams
from openspec.messages import (
    SpeculativeOptions,
    StructuredOutputs,
    acceptance_per_position,
)
from openspec.text.outputs import RequestOutput
from tests.gates.test_logits import (
    MAX_ERROR,
    Subject,
    assert_same_bits,
    reference,
    rms_error,
    worst_error,
)
from tests.real_model.smollm2 import FOLDER, GGUF, smollm2, write_first_layers

pytestmark = pytest.mark.full

PLAIN = SpeculativeOptions(enabled=False)
TEXTS = (
    'The year 1984, 3.14159 and 007: it\'s "quoted"  twice.\n\n\tdef f(x):\n        return x',
    "Ünïcödé 日本語 🙂 <|im_start|>user\nHello<|im_end|>\n",
)
PROBLEMS = (
    "A shop sells pens for 3 dollars each. Tom buys 4 pens and pays with 20 dollars. How much "
    "change does he get?",
    "Sara reads 12 pages a day. How many pages does she read in a week?",
)
CHATS = (("Write three rules for a chess club.", "Shorten the second rule."),)
MAX_GAP = 1e-3
"""By how much a greedy token's logit may be below the largest one of transformers, in float32."""


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    settings: dict[str, Any] = {"max_model_len": 1024, "num_threads": 2, "stats_interval_s": 0.0}
    with LLM(str(smollm2()), dtype="float32", max_num_seqs=8, **settings) as made:
        yield made


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small files in the form of GSM8K and of MT-bench."""
    folder = tmp_path_factory.mktemp("data")
    problems = [json.dumps({"question": problem, "answer": ""}) for problem in PROBLEMS]
    (folder / "gsm8k_test.jsonl").write_text("\n".join(problems))
    chats = [json.dumps({"turns": turns}) for turns in CHATS]
    (folder / "mt_bench.jsonl").write_text("\n".join(chats))
    return folder


def ask(llm: LLM, asked: Sequence[str], params: SamplingParams, **how: Any) -> list[RequestOutput]:
    conversations = [[{"role": "user", "content": text}] for text in asked]
    return llm.chat(conversations, params, use_tqdm=False, **how)


def token_ids(outputs: list[RequestOutput]) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in outputs]


def test_the_folder_is_what_transformers_reads_from_the_gguf() -> None:
    folder = smollm2()
    ours = transformers.AutoConfig.from_pretrained(folder)
    theirs = transformers.AutoConfig.from_pretrained(FOLDER.parent, gguf_file=GGUF)
    for name in ("rope_parameters", "tie_word_embeddings", "eos_token_id", "head_dim"):
        assert getattr(ours, name) == getattr(theirs, name), name
    assert ours.rms_norm_eps == pytest.approx(theirs.rms_norm_eps, rel=1e-6)  # float32 there
    with torch.device("meta"):  # for the names of its tensors alone
        model = transformers.LlamaForCausalLM(ours)
    read = load_gguf_checkpoint(FOLDER.parent / GGUF, return_tensors=True, model_to_load=model)
    weights = load_file(folder / "model.safetensors")
    assert weights.keys() == read["tensors"].keys()
    for name, tensor in weights.items():
        assert torch.equal(tensor, read["tensors"][name].bfloat16()), name
    tokenizer = transformers.AutoTokenizer.from_pretrained(FOLDER.parent, gguf_file=GGUF)
    mine = transformers.AutoTokenizer.from_pretrained(folder)
    chat = [{"role": "user", "content": "Hello"}]
    for text in (*TEXTS, mine.apply_chat_template(chat, tokenize=False)):
        assert mine.encode(text) == tokenizer.encode(text)
        assert mine.decode(mine.encode(text)) == text


def test_logits_beside_transformers() -> None:
    """As tests/gates/test_logits.py has it of other targets."""
    folder = smollm2()
    ids = transformers.AutoTokenizer.from_pretrained(folder).encode(" ".join((*TEXTS, *PROBLEMS)))
    truth = reference(folder, ids, torch.float32)
    subject = Subject(folder)
    whole = subject.score(ids, len(ids))
    assert worst_error(whole.logits, truth.logits) < MAX_ERROR
    for found, true in zip(whole.layers, truth.layers, strict=True):
        assert worst_error(found, true) < MAX_ERROR
    assert_same_bits(subject.score(ids, 7, 1, 16), whole)
    ours = Subject(folder, dtype="bfloat16").score(ids, 64, 1)
    theirs = reference(folder, ids, torch.bfloat16)
    assert rms_error(ours.logits, truth.logits) <= rms_error(theirs.logits, truth.logits)


def test_tokens_beside_transformers(llm: LLM) -> None:
    """Each greedy token is the one that transformers finds most likely after those before it."""
    outputs = ask(llm, PROBLEMS, SamplingParams(temperature=0.0, max_tokens=64), speculative=PLAIN)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(llm.config.model_path).float()
    for output in outputs:
        prompt, answer = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1]
        chosen = logits.gather(-1, torch.tensor(answer)[:, None])[:, 0]
        assert float((logits.max(-1).values - chosen).max()) < MAX_GAP


def test_drafts_change_no_text_on_seven_tasks(llm: LLM, data: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=48)
    asked = [next(KINDS[kind](data))[0] for kind in KINDS]
    assert len(asked) == 7
    plain = ask(llm, asked, params, speculative=PLAIN)
    before = llm.stats()
    drafted = ask(llm, asked, params)
    after = llm.stats()
    assert token_ids(drafted) == token_ids(plain)
    alone = [ask(llm, [text], params)[0] for text in asked[:3]]
    assert token_ids(alone) == token_ids(plain[:3])
    # Some of these answers repeat their prompt.
    assert after.num_accepted_tokens - before.num_accepted_tokens >= 32


def test_its_own_first_layers_draft(llm: LLM, tmp_path: Path) -> None:
    """24 of 30 layers, of which nobody trained the last to be one: some drafts are right."""
    settings: dict[str, Any] = {"max_model_len": 1024, "num_threads": 2, "stats_interval_s": 0.0}
    asked = (*PROBLEMS, CHATS[0][0])
    with LLM(
        str(smollm2()),
        method="draft_model",
        draft_model=str(write_first_layers(tmp_path / "first", 24)),
        num_speculative_tokens=4,
        adaptive_speculation=False,
        copied_drafts=False,
        dtype="float32",
        max_num_seqs=4,
        **settings,
    ) as drafted:
        for temperature in (0.0, 0.7):
            params = SamplingParams(temperature=temperature, max_tokens=48, seed=5)
            found = token_ids(ask(drafted, asked, params))
            assert found == token_ids(ask(llm, asked, params, speculative=PLAIN))
        stats = drafted.stats()
    shares = acceptance_per_position(stats)
    print(f"accepted by depth: {[round(share, 2) for share in shares]}")
    assert 0.2 < shares[0] < 0.6


def test_a_second_turn_sees_the_first_answer(llm: LLM) -> None:
    first, second = CHATS[0]
    params = SamplingParams(temperature=0.0, max_tokens=48)
    (said,) = ask(llm, [first], params)
    turns = [
        {"role": "user", "content": first},
        {"role": "assistant", "content": said.outputs[0].text},
        {"role": "user", "content": second},
    ]
    drafted = llm.chat(turns, params, use_tqdm=False)
    assert token_ids(drafted) == token_ids(
        llm.chat(turns, params, use_tqdm=False, speculative=PLAIN)
    )


STRUCTURED = (
    (
        "What is the capital of France? Answer in JSON.",
        {
            "type": "object",
            "properties": {"capital": {"type": "string", "maxLength": 20}},
            "required": ["capital"],
            "additionalProperties": False,
        },
        {"capital": "Paris"},
    ),
    (
        "Anna is 31 years old and lives in Oslo. Write her name, age and city as JSON.",
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 20},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "city": {"enum": ["Lisbon", "Oslo", "Quito"]},
            },
            "required": ["name", "age", "city"],
            "additionalProperties": False,
        },
        {"name": "Anna", "age": 31, "city": "Oslo"},
    ),
)


@pytest.mark.parametrize(("question", "schema", "answer"), STRUCTURED)
def test_structured_answers_make_sense(
    llm: LLM, question: str, schema: dict[str, Any], answer: dict[str, Any]
) -> None:
    params = SamplingParams(
        temperature=0.0, max_tokens=96, structured_outputs=StructuredOutputs(json=schema)
    )
    (drafted,) = ask(llm, [question], params)
    assert json.loads(drafted.outputs[0].text) == answer
    assert token_ids([drafted]) == token_ids(ask(llm, [question], params, speculative=PLAIN))


def test_sampled_texts_depend_on_the_seed_alone(llm: LLM) -> None:
    question = "Rewrite: the quick brown fox jumps over the lazy dog, the quick brown fox."
    texts = []
    for seed in range(4):
        params = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=32, seed=seed)
        (drafted,) = token_ids(ask(llm, [question], params))
        assert [drafted] == token_ids(ask(llm, [question], params, speculative=PLAIN))
        texts.append(tuple(drafted))
    assert len(set(texts)) > 1
    many = SamplingParams(temperature=0.7, top_p=0.95, max_tokens=32, seed=0)
    together = token_ids(ask(llm, [question, *islice(PROBLEMS, 2)], many))
    assert tuple(together[0]) == texts[0]
