"""`LLM.swap_drafter`: which heads are taken, and that the others leave everything as it is."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from openspec import LLM, ConfigError, RequestError
from openspec.checkpoint.other_head import difference
from openspec.config import EMBEDDED_MODEL
from openspec.messages import SamplingParams
from openspec.specs.layers import AttentionSpec, DenseMlpSpec, LayerSpec
from tests.heads import untrained
from tests.heads.other import make

SETTINGS: dict[str, object] = {
    "device": "cpu",
    "method": "eagle3",
    "max_model_len": 256,
    "max_num_seqs": 4,
    "num_threads": 1,
    "adaptive_speculation": False,
}
HEAD = EMBEDDED_MODEL / "eagle3"
PROMPT = "Tom has 3 apples and buys 4 more."
GREEDY = SamplingParams(temperature=0.0, max_tokens=24)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("heads")
    make(HEAD, folder / "noisy")
    make(HEAD, folder / "same", same)
    return folder


@pytest.fixture(scope="module")
def llm(root: Path) -> Iterator[LLM]:
    with LLM(**SETTINGS, drafter_dir=str(root)) as one:  # type: ignore[arg-type]
        yield one


def same(_: str, tensor: Tensor) -> Tensor:
    return tensor


def answer(llm: LLM) -> list[int]:
    return list(llm.generate(PROMPT, GREEDY, use_tqdm=False)[0].outputs[0].token_ids)


def test_swap_and_rollback(llm: LLM, root: Path) -> None:
    expected = answer(llm)
    before = llm.drafter()
    assert before.version == 1
    assert before.folder == str(HEAD)
    state = llm.swap_drafter("noisy")
    assert state.version == 2
    assert state.folder == str(root / "noisy")
    weights = (root / "noisy" / "model.safetensors").read_bytes()
    assert state.sha256 == hashlib.sha256(weights).hexdigest()
    assert state.stage_ms > 0
    assert state.gap_us > 0
    assert state.since > before.since
    assert answer(llm) == expected
    assert llm.drafter().counters.num_drafts > 0
    state = llm.rollback_drafter()
    assert (state.version, state.num_swaps) == (1, 2)
    assert state.previous is not None
    assert state.previous.version == 2
    assert answer(llm) == expected
    # By an absolute path, with its hash, and without what is cached.
    hits = llm.stats().prefix_cache_hits
    state = llm.swap_drafter(
        root / "same",
        sha256=hashlib.sha256((root / "same" / "model.safetensors").read_bytes()).hexdigest(),
        flush_prefix_cache=True,
    )
    assert state.version == 3
    assert answer(llm) == expected
    assert llm.stats().prefix_cache_hits == hits


def test_a_swap_while_another_thread_generates(llm: LLM) -> None:
    expected = answer(llm)
    answers: list[list[int]] = []
    is_over = threading.Event()

    def generate() -> None:
        while not is_over.is_set():
            answers.append(answer(llm))

    thread = threading.Thread(target=generate)
    thread.start()
    versions = [llm.swap_drafter(path).version for path in ("noisy", "same")]
    versions.append(llm.rollback_drafter().version)
    is_over.set()
    thread.join()
    assert versions[0] + 1 == versions[1] == versions[2] + 1
    assert answers
    assert all(one == expected for one in answers)


def broken(root: Path, name: str, change: Callable[[Path], None]) -> str:
    """A copy of the head in which `change` breaks something."""
    shutil.rmtree(root / name, ignore_errors=True)
    make(HEAD, root / name, same)
    change(root / name)
    return name


def with_key(key: str, value: object) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, key: value}))

    return change


def with_tensors(change: Callable[[str, Tensor], Tensor]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        shutil.rmtree(folder)
        make(HEAD, folder, change)

    return apply


def one_nan(name: str, tensor: Tensor) -> Tensor:
    if name == "fc.weight":
        tensor = tensor.clone()
        tensor[3, 5] = torch.nan
    return tensor


def other_numbers_of(dtype: torch.dtype) -> Callable[[str, Tensor], Tensor]:
    return lambda _, tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor


def cut_file(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def replaced_by(source: Path) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        shutil.rmtree(folder)
        shutil.copytree(source, folder)

    return change


def few_draft_tokens(name: str, tensor: Tensor) -> Tensor:
    return tensor[:1024].contiguous() if name in ("lm_head.weight", "d2t") else tensor


def few_tokens(folder: Path) -> None:
    with_tensors(few_draft_tokens)(folder)
    with_key("draft_vocab_size", 1024)(folder)


def marked_by_ids(name: str, tensor: Tensor) -> Tensor:
    return tensor.flip(0) if name == "d2t" else tensor


def linked_out(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(HEAD / "model.safetensors")


REFUSALS: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "a cut file": (cut_file, "drafter_unreadable", "not a whole safetensors file"),
    "NaN": (with_tensors(one_nan), "drafter_not_finite", "1 tensors hold NaN.*fc.weight"),
    "float32": (
        with_tensors(other_numbers_of(torch.float32)),
        "drafter_unreadable",
        "must be bf16",
    ),
    "pickle": (pickled, "drafter_unreadable", "can run code"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "drafter_unreadable", "config"),
    "another method": (
        replaced_by(EMBEDDED_MODEL / "dflash"),
        "drafter_unreadable",
        "DFlash|dflash|eagle|EAGLE",
    ),
    "more layers": (
        replaced_by(Path(str(untrained.draft_model("eagle3", untrained.LAYERS)))),
        "drafter_other_shape",
        "/layers",
    ),
    "another norm": (with_key("norm_before_residual", True), "drafter_other_shape", "/norm_before"),
    "fewer tokens": (
        few_tokens,
        "drafter_(other_shape|unreadable)",
        "draft_vocab_size|t2d",
    ),
    "a map that falls": (with_tensors(marked_by_ids), "drafter_unreadable", "d2t"),
    "a link": (linked_out, "drafter_outside", "leads out of drafter_dir"),
    "a pipe": (
        lambda folder: os.mkfifo(folder / "model-2.safetensors"),
        "drafter_unreadable",
        "no regular file",
    ),
}


@pytest.mark.parametrize("kind", REFUSALS)
def test_what_is_refused(kind: str, llm: LLM, root: Path) -> None:
    change, code, message = REFUSALS[kind]
    llm.swap_drafter("noisy")
    before = llm.drafter()
    with pytest.raises(RequestError, match=message) as caught:
        llm.swap_drafter(broken(root, "broken", change))
    assert re.fullmatch(code, caught.value.code or "")
    after = llm.drafter()
    assert (after.version, after.folder, after.num_swaps) == (
        before.version,
        before.folder,
        before.num_swaps,
    )
    assert after.previous is not None
    assert before.previous is not None
    assert llm.rollback_drafter().version == before.previous.version


@pytest.mark.parametrize("path", ["../elsewhere", "/etc", str(HEAD), "a/../../elsewhere"])
def test_paths_that_lead_elsewhere(path: str, llm: LLM) -> None:
    with pytest.raises(RequestError, match="leads out of drafter_dir") as caught:
        llm.swap_drafter(path)
    assert caught.value.code == "drafter_outside"


@pytest.mark.parametrize("path", ["nowhere", "noisy/model.safetensors", "a\0b", "x" * 5000])
def test_paths_of_no_folder(path: str, llm: LLM) -> None:
    with pytest.raises(RequestError) as caught:
        llm.swap_drafter(path)
    assert caught.value.code == "drafter_unreadable"


def test_another_hash(llm: LLM) -> None:
    with pytest.raises(RequestError, match="SHA-256") as caught:
        llm.swap_drafter("noisy", sha256="0" * 64)
    assert caught.value.code == "drafter_sha256"


def test_without_room() -> None:
    with LLM(**SETTINGS) as llm:  # type: ignore[arg-type]
        with pytest.raises(RequestError, match="--drafter-dir") as caught:
            llm.swap_drafter("noisy")
        assert caught.value.code == "drafter_swap_off"
        with pytest.raises(RequestError, match="no head drafted before") as caught:
            llm.rollback_drafter()
        assert caught.value.code == "no_previous_drafter"
        assert llm.drafter().version == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"drafter_dir": "/nowhere"}, "is no folder"),
        ({"drafter_dir": ".", "tensor_parallel_size": 2}, "on one device, not on 2"),
        ({"drafter_dir": ".", "method": "ngram"}, "'ngram' has none"),
        ({"drafter_dir": ".", "num_speculative_tokens": 0}, "has none"),
    ],
)
def test_settings_that_cannot_be(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        LLM(**{**SETTINGS, **settings})  # type: ignore[arg-type]


def test_the_room_is_as_large_as_the_head(llm: LLM) -> None:
    with LLM(**SETTINGS) as without:  # type: ignore[arg-type]
        spare = (
            llm.engine.info.memory_plan["drafter_bytes"]
            - without.engine.info.memory_plan["drafter_bytes"]
        )
    size = (HEAD / "model.safetensors").stat().st_size
    assert 0.9 * size < spare < 1.1 * size


def test_the_first_difference_is_named() -> None:
    mixer = AttentionSpec(
        num_q_heads=4,
        num_kv_heads=2,
        head_dim=8,
        has_qk_norm=False,
        inv_freq=(1.0, 0.5),
        rope_scale=1.0,
    )
    layers = (LayerSpec(mixer=mixer, mlp=DenseMlpSpec(intermediate_size=16)),)
    wider = (LayerSpec(mixer=mixer, mlp=DenseMlpSpec(intermediate_size=32)),)
    assert difference(layers, layers) is None
    assert difference(layers, wider) == ("/0/mlp/intermediate_size", "16", "32")
    assert difference(layers, layers * 2) == ("", "1 entries", "2 entries")
