"""An MTP head without training: a linear guess of the target's next state, fitted to given texts.

Its layer is random and adds little. On these texts many drafts are right, more of the first than of
the later ones.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor

from openspec import _C, LLM
from openspec.checkpoint.targets.config import ModelConfig
from openspec.config import EMBEDDED_MODEL, config_from_settings
from openspec.engine.load import load_engine
from openspec.messages import SamplingParams
from tests.gates import hybrid_target
from tests.gates.workload import prompts
from tests.heads.seeded import drawn, write

GAINS = {"o_proj": 0.1, "down_proj": 0.1}
ZEROS = (0.0, 0.0)
"""Norms hold their weights less 1."""
RIDGE = 1e-3


def states_of(target: Path, texts: Sequence[Sequence[int]]) -> list[Tensor]:
    """What leaves the target's last layer [tokens, hidden], of each text."""
    core = load_engine(
        config_from_settings(
            {"model": str(target), "method": "none", "device": "cpu", "dtype": "float32"}
            | {"max_model_len": 512, "max_num_seqs": 2, "enable_prefix_caching": False}
            | {"stats_interval_s": 0.0, "num_threads": 1, "adaptive_speculation": False}
        )
    )
    runner = core._runner  # type: ignore[attr-defined]
    runner.set_capture([ModelConfig.from_folder(target).num_layers - 1])
    params = _C.SequenceParams(SamplingParams(temperature=0.0), max_tokens=1)
    states = []
    for text in texts:
        slot = runner.add_sequence(list(text), len(text), params)
        lease = runner.reserve([(slot, len(text), 0)])
        lease.launch()
        lease.collect()
        states.append(torch.tensor(runner.captured()))
        lease.commit()
        runner.remove_sequence(slot)
    return states


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def folder(target: Path, texts: Sequence[Sequence[int]], *, is_hybrid: bool) -> Path:
    """A draft model for `target`, which has the embedded model's sizes; `is_hybrid`: its kind."""
    weights = load_file(target / "model.safetensors")
    table = weights["model.embed_tokens.weight"].float()
    gain = weights["model.norm.weight"].float() + is_hybrid
    inputs, outputs = [], []
    for text, states in zip(texts, states_of(target, texts), strict=True):
        embedded = table[torch.tensor(text[1:])]
        inputs.append(torch.cat((_normed(embedded), _normed(_normed(states[:-1]) * gain)), -1))
        outputs.append(_normed(states[1:]))
    x, y = torch.cat(inputs).double(), torch.cat(outputs).double()
    square = x.T @ x + RIDGE * len(x) * torch.eye(x.shape[1])
    given = {
        "mtp.fc.weight": torch.linalg.solve(square, x.T @ y).T.float(),
        "mtp.norm.weight": gain - 1.0,
    }
    shapes = dict(hybrid_target.mtp_shapes(hybrid_target.CONFIG))
    root = Path(tempfile.mkdtemp(prefix="openspec-fitted-"))
    return write(root, (hybrid_target.CONFIG, drawn(shapes, 5, GAINS, ZEROS, given)))


@cache
def embedded() -> Path:
    """For the embedded model, fitted to what it answers to the gates' prompts."""
    with LLM(method="none", device="cpu", max_model_len=512, num_threads=1) as llm:
        sampling = SamplingParams(temperature=0.0, max_tokens=48)
        outputs = llm.generate(list(map(list, prompts())), sampling, use_tqdm=False)
    known = [[*one.prompt_token_ids, *one.outputs[0].token_ids] for one in outputs]
    return folder(EMBEDDED_MODEL, known, is_hybrid=False)
