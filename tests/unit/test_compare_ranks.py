"""Steps of one model on several numbers of GPUs, from the files of the step's benchmark."""

import json
from pathlib import Path

import pytest
from bench.compare_ranks import main


def write(folder: Path, num_gpus: int, step_ms: float, digest: str, shape: str = "qwen3-4b") -> str:
    one = {"step_ms": step_ms, "digest": digest}
    run = {"proposing_graph_ms": {"4": 2.0}, "c1": one, "prompt2048_first_token_ms": 30.0}
    path = folder / f"{shape}.{num_gpus}.json"
    whole = {"shape": shape, "tensor_parallel_size": num_gpus, "floor_ms": 1.0, "none": run}
    path.write_text(json.dumps(whole))
    return str(path)


def test_times_and_texts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [write(tmp_path, 2, 1.2, "7"), write(tmp_path, 1, 2.0, "7")]
    assert main(files) == 0
    out = capsys.readouterr().out
    assert "qwen3-4b, 1 -> 2 GPUs: none c1 step_ms 2.000 -> 1.200, 0.600\n" in out
    assert out.endswith("1 texts compared, 0 differ\n")
    assert main([*files, write(tmp_path, 4, 0.8, "8")]) == 1
    assert "1 -> 4 GPUs: none c1 step_ms 2.000 -> 0.800, 0.400, OTHER TEXT\n" in (
        capsys.readouterr().out
    )


def test_nothing_to_compare(tmp_path: Path) -> None:
    """As where every shape was refused on more GPUs."""
    assert main([write(tmp_path, 1, 2.0, "7"), write(tmp_path, 2, 2.0, "7", "qwen3-8b")]) == 1
