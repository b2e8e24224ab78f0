"""What a step of training takes of memory at a 4B's shape, counted on tensors without numbers."""

from __future__ import annotations

import dataclasses
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from openspec.adapt.heads import kind_named
from openspec.adapt.heads.parts import Geometry, HeadPlan, Lesson, TargetEnds, TrainableHead
from openspec.adapt.loop import make_optimizer

QWEN3_4B = Geometry(
    hidden_size=2560,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=9728,
    num_layers=1,
    vocab_size=151_936,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    trained_length=1024,
)
NUM_LAYERS = 36
ROWS = 2


class Bytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are alive, and the most that there were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.most = 0
        self._known: set[int] = set()

    def __torch_dispatch__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in tree_leaves(made):
            if isinstance(one, Tensor):
                self._add(one.untyped_storage())
        return made

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        if key not in self._known:
            self._known.add(key)
            self.now += size
            self.most = max(self.most, self.now)
            weakref.finalize(storage, self._free, key, size)

    def _free(self, key: int, size: int) -> None:
        self._known.remove(key)
        self.now -= size


def new_head(name: str) -> TrainableHead:
    kind = kind_named(name)
    plan = HeadPlan(
        geometry=dataclasses.replace(QWEN3_4B, num_layers=kind.num_layers),
        capture_layers=kind.default_capture_layers(NUM_LAYERS, kind.num_layers),
        num_target_layers=NUM_LAYERS,
        vocabulary=torch.arange(32_000),
        mask_token=QWEN3_4B.vocab_size - 1,
        block_size=16,
        num_anchors=64,
    )
    return kind.make(plan)


def lesson_of(head: TrainableHead) -> Lesson:
    shape = (ROWS, QWEN3_4B.trained_length)
    ids, width = torch.zeros(shape, dtype=torch.long), QWEN3_4B.hidden_size
    captured = torch.zeros(*shape, len(head.capture_layers) * width, dtype=torch.bfloat16)
    last = torch.zeros(*shape, width, dtype=torch.bfloat16)
    return Lesson(ids, ids.clone(), torch.zeros(shape, dtype=torch.bool), captured, last)


@pytest.mark.parametrize(
    ("kind", "drafts", "gigabytes"), [("eagle3", 5, 7.6), ("dflash", 15, 13.6)]
)
def test_a_step_at_the_shape_of_a_4b(kind: str, drafts: int, gigabytes: float) -> None:
    """Rows of 2 x 1,024, with the target's embedding; replay has 0.2 GB beside it.

    Products are in bfloat16 as on a GPU, whose tensors the CPU's stand for.
    """
    with FakeTensorMode(allow_non_fake_inputs=True), Bytes() as counted:
        head = new_head(kind)
        head.learn_for(drafts)
        shape = (QWEN3_4B.vocab_size, QWEN3_4B.hidden_size)
        embedding = torch.zeros(shape, dtype=torch.bfloat16)
        norm = torch.zeros(QWEN3_4B.hidden_size, dtype=torch.bfloat16)
        ends = TargetEnds(embedding=embedding, norm=norm, head=embedding, rms_norm_eps=1e-6)
        optimizer = make_optimizer(head, 1e-4)
        for parameter in head.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer.step()  # makes its moments
        optimizer.zero_grad()
        counted.most = counted.now
        with torch.autocast("cpu", torch.bfloat16):
            loss = head.loss(lesson_of(head), ends, torch.Generator())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
    assert 0.9 * gigabytes < counted.most / 1e9 < gigabytes
