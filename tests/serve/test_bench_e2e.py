"""The benchmark and the demo against the real server on the embedded model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", *arguments],
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )


@pytest.mark.slow
def test_benchmark(tmp_path: Path) -> None:
    out, html = tmp_path / "out.json", tmp_path / "report.html"
    done = run(
        "openspec.bench",
        "--workload=repeat,random",
        "--concurrency=1,3",
        "--num-prompts=3",
        "--max-tokens=24",
        "--input-len=20",
        "--repeats=1",
        "--temperature=0.8",
        "--no-adaptive-speculation",  # or whether there are drafts depends on the machine's pace
        f"--json={out}",
        f"--html={html}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "32/32 identical to plain" in done.stdout
    runs = json.loads(out.read_text())["runs"]
    assert len(runs) == 2 * 2 * 2
    for entry in runs:
        assert entry["identical_to_plain"] is True
        assert entry["output_tokens_per_s"] > 0
        assert entry["num_requests"] == max(3, 4 * entry["concurrency"])
    drafted = [entry for entry in runs if entry["workload"] == "repeat" and entry["num_drafts"]]
    assert {entry["method"] for entry in drafted} == {"ngram"}
    assert all(0 < entry["acceptance_rate"] <= 1 for entry in drafted)
    assert "--temperature 0.8" in html.read_text()


@pytest.mark.full
def test_step_times_are_shown(tmp_path: Path) -> None:
    html = tmp_path / "report.html"
    done = run(
        "openspec.bench",
        "--workload=mixed",
        "--concurrency=4",
        "--num-prompts=6",
        "--max-tokens=24",
        "--repeats=1",
        f"--html={html}",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16/16 identical to plain" in done.stdout
    assert "Step times, by rows and sequences" in html.read_text()


@pytest.mark.slow
def test_demo() -> None:
    done = run("openspec.demo", "--max-tokens=32")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "identical to plain decoding: yes" in done.stdout
    assert "tok/s" in done.stdout
    assert "python -m openspec.serve" in done.stdout
    assert "\x1b[" not in done.stdout
