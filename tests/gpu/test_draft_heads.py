"""The embedded draft heads on the GPU against the golden tests' references.

The error of a first draft's logits, against float32, is at most that of the same PyTorch code in
bfloat16.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from openspec import _C
from tests.golden import make_dflash, make_dflash2, make_eagle3
from tests.golden.eagle3_reference import captured_layers
from tests.golden.engine_runs import make_runner, prefill, step, step_all
from tests.golden.make_eagle3 import TINY
from tests.golden.target_reference import forward
from tests.heads import untrained

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _C.has_cuda(), reason=f"no CUDA: {_C.why_no_cuda()}"),
]

MAX_TOKENS = 72
DRAFT_VOCAB = {"eagle3": 2048, "dflash": 4096, "dspark": 4096}


class StoresBfloat16(TorchFunctionMode):
    """What a model in bfloat16 keeps: products (by autocast) and sums, the residual stream's."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        is_sum = getattr(func, "__name__", "") in ("add", "__add__", "__radd__")
        if is_sum and all(isinstance(x, Tensor) and x.is_floating_point() for x in args):
            return out.bfloat16().float()
        return out


def eagle3_logits(case: make_eagle3.Case, tokens: list[int], counts: list[int]) -> Tensor:
    """Logits of the first draft after `count` tokens, for each count: [counts, vocabulary]."""
    reference = case.reference()
    layers = captured_layers(case.head[0], case.target[0]["num_hidden_layers"])
    _, states = forward(*case.target, tokens[:-1])
    captured = torch.cat([states[layer] for layer in layers], -1)
    drafting, _ = reference.extend(reference.empty(), tokens[1:], captured)
    return reference.logits(drafting[[count - 2 for count in counts]]).float()


def block_logits(case: make_dflash.Case, tokens: list[int], counts: list[int]) -> Tensor:
    """Logits of a block head's first draft after `count` tokens: [counts, vocabulary]."""
    reference = case.reference()
    _, states = forward(*case.target, tokens[:-1])
    captured = torch.cat([states[layer] for layer in reference.format.captured_layers], -1)
    rows = []
    for count in counts:
        context = reference.extend(reference.empty(), captured[: count - 1])
        rows.append(reference.chain(context, tokens[count - 1], 1).logits[0])
    return torch.stack(rows).float()


def draft_along(
    method: str, prompt: list[int], vocab_size: int, head: Path | None = None, device: str = "cuda"
) -> tuple[list[int], list[int], Tensor]:
    """The engine's text, the numbers of tokens at which it drafted, and those drafts' logits.

    A step has room for more rows than it needs; the draft's is the first.
    """
    # Where their distribution counts, what a Markov head adds is in the logits.
    options = {"acceptance": "rejection"} if method == "dspark" else {}
    runner = make_runner(
        (TINY, head or TINY / method), method, 1, device=device, dtype="bfloat16", **options
    )
    slot, known = prefill(runner, prompt)
    tokens = prompt + known
    counts, logits = [], []
    while len(tokens) < MAX_TOKENS:
        added = step(runner, slot, 1, 1)
        if not runner.last_drafts()[0]:  # the last token that it may have needs none
            break
        counts.append(len(tokens))
        logits.append(torch.tensor(runner.last_draft_logits()[:vocab_size]))
        tokens += added
    return tokens[: counts[-1]], counts, torch.stack(logits)


@pytest.mark.parametrize("method", ["eagle3", "dflash", "dspark"])
def test_error_is_no_larger_than_the_references(method: str) -> None:
    ours, theirs = [], []
    for name in make_eagle3.PROMPTS:
        if method == "eagle3":
            case: Any = dict(make_eagle3.cases())[name]
            reference: Callable[..., Tensor] = eagle3_logits
        else:
            case = dict(make_dflash.cases())[f"{method}_{name}"]
            reference = block_logits
        tokens, counts, found = draft_along(method, case.prompt, DRAFT_VOCAB[method])
        assert len(counts) > 5
        truth = reference(case, tokens, counts)
        with torch.autocast("cpu", torch.bfloat16), StoresBfloat16():
            in_bfloat16 = reference(case, tokens, counts)
        ours.append((found - truth).square().mean(-1))
        theirs.append((in_bfloat16 - truth).square().mean(-1))
    our_error, their_error = (torch.cat(one).mean().sqrt().item() for one in (ours, theirs))
    assert our_error <= their_error


def test_convolved_blocks_err_as_on_the_cpu() -> None:
    """Both devices round at the same places; only sums are taken in another order."""
    head = untrained.folder("dflash2")
    errors = {}
    for device in ("cpu", "cuda"):
        parts = []
        for name in make_eagle3.PROMPTS:
            prompt = dict(make_dflash.cases())[f"dflash_{name}"].prompt
            tokens, counts, found = draft_along("dflash", prompt, 4096, head, device)
            assert len(counts) > 5
            case = make_dflash.Case(make_eagle3.load(TINY), make_eagle3.load(head), prompt)
            reference = make_dflash2.reference_of(case)
            _, states = forward(*case.target, tokens[:-1])
            captured = torch.cat([states[at] for at in reference.format.captured_layers], -1)
            for count, logits in zip(counts, found, strict=True):
                context = reference.extend(reference.empty(), captured[: count - 1])
                truth = reference.select(context, tokens[count - 1], 1).logits[0]
                parts.append((logits - truth).square().mean())
        errors[device] = torch.stack(parts).mean().sqrt().item()
    assert 0 < errors["cuda"] <= 1.25 * errors["cpu"]


def test_chances_of_drafts_are_the_cpus() -> None:
    """By which sequences share a step's rows; as far as both devices draft the same."""
    prompts = [dict(make_dflash.cases())[f"dspark_{name}"].prompt for name in make_eagle3.PROMPTS]
    drafted = []
    for device, dtype in (("cpu", "float32"), ("cuda", "bfloat16")):
        folders = (TINY, TINY / "dspark")
        options = {"device": device, "dtype": dtype, "max_num_seqs": len(prompts)}
        runner = make_runner(folders, "dspark", 7, **options)
        slots, known = zip(*(prefill(runner, prompt) for prompt in prompts), strict=True)
        step_all(runner, [(slot, 1, 7) for slot in slots])
        chains = []
        for tokens, drafts, scores in zip(
            known, runner.last_drafts(), runner.last_draft_scores(), strict=True
        ):
            assert len(scores) == len(drafts) == 7
            assert all(a >= b for a, b in itertools.pairwise([0.0, *scores]))
            chains.append([(tokens[-1], 1.0), *zip(drafts, map(math.exp, scores), strict=True)])
        drafted.append(chains)
    num_compared = 0
    for expected, found in zip(*drafted, strict=True):
        for (token, chance), (other, other_chance) in zip(expected, found, strict=True):
            if token != other:
                break
            assert other_chance == pytest.approx(chance, abs=0.1)
            num_compared += 1
    assert num_compared > 5
