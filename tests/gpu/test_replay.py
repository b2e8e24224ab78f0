"""What a replay reads on a GPU without the host."""

from __future__ import annotations

import pytest
import torch

from openspec import _C, LLM
from openspec.adapt.replay import Replay
from openspec.config import EMBEDDED_MODEL
from openspec.engine.load import CompiledRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not _C.has_cuda(), reason=f"no CUDA: {_C.why_no_cuda()}"),
]


def test_states_on_the_device_are_those_that_the_host_is_told() -> None:
    texts = [[5, 6, 7, 8, 9] * 8, [11] * 70, [7, 8]]
    with LLM(model=str(EMBEDDED_MODEL), device="cuda", max_num_batched_tokens=256) as llm:
        runner = llm.engine.runner
        assert isinstance(runner, CompiledRunner)
        like = torch.empty(0, device="cuda", dtype=torch.bfloat16)
        states = Replay(llm, (0, 2, 3), like).texts(texts)
        told = torch.from_numpy(runner.captured())  # of all texts, which one step holds
    assert [len(of) for of in states] == [40, 70, 2]
    assert torch.equal(torch.cat(states).float().cpu(), told)
