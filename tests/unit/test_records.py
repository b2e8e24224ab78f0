"""Records of texts: their format, who may read them, and their limits."""

from __future__ import annotations

import threading
import time
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from openspec.errors import ConfigError
from openspec.records import recorder as recorders
from openspec.records.recorder import Limits, Recorder
from openspec.records.shards import (
    MANIFEST,
    Record,
    decoded,
    encoded,
    erase,
    read_records,
    shards,
    target_identity,
)

RECORDS = [
    Record([1, 2, 3, 4_000_000], 2, 7, 0.5),
    Record([5, 6], 1, 8),
    Record([9] * 100, 99, 9, 1.0),
]
LIMITS = Limits(share=1.0, max_rate=1e9, max_bytes=1 << 20, ttl_s=3600.0)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "records"


def test_what_is_written_is_read() -> None:
    data = b"".join(map(encoded, RECORDS))
    assert list(decoded(data)) == RECORDS
    assert len(encoded(RECORDS[2])) == 28 + 4 * 100


@pytest.mark.parametrize("cut", [1, 3, 100, 399, 420])
def test_a_cut_end_is_left_out(cut: int) -> None:
    data = b"".join(map(encoded, RECORDS))
    assert list(decoded(data[:-cut])) == RECORDS[:2]


@pytest.mark.parametrize("place", [0, 5, 9, 13, 30])
def test_a_damaged_record_ends_its_shard(place: int) -> None:
    data = bytearray(b"".join(map(encoded, RECORDS)))
    data[len(encoded(RECORDS[0])) + place] ^= 0x80
    assert list(decoded(bytes(data))) == RECORDS[:1]


def test_a_recorder_writes_what_it_is_given(folder: Path) -> None:
    recorder = Recorder(folder, "target", LIMITS)
    for record in RECORDS:
        assert recorder.offer(record.tokens, record.prompt, record.temperature)
    recorder.close()
    found = list(read_records(folder, "target"))
    assert [one._replace(time=0) for one in found] == [one._replace(time=0) for one in RECORDS]
    assert all(abs(one.time - time.time()) < 60 for one in found)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    again = Recorder(folder, "target", LIMITS)
    assert again.offer([1, 2], 1, 0.0)
    again.close()
    assert len(list(read_records(folder, "target"))) == 4
    assert erase(folder) == 2
    assert list(read_records(folder, "target")) == []


def test_what_comes_after_erasing_is_kept(folder: Path) -> None:
    recorder = Recorder(folder, "target", LIMITS)
    for number in range(3):
        recorder.offer([number, 1], 1, 0.0)
        while recorder.num_bytes == 0:
            time.sleep(0.001)
        removed = erase(folder) if number == 0 else recorder.erase() if number == 1 else 0
        assert removed == (number < 2)
    recorder.close()
    assert [record.tokens for record in read_records(folder, "target")] == [[2, 1]]


def test_old_and_surplus_shards_go(folder: Path) -> None:
    recorder = Recorder(folder, "target", replace(LIMITS, max_bytes=8000))
    for number in range(40):  # two fill a shard of a thousand bytes
        recorder.offer([number] * 100, 1, 0.0)
    recorder.close()
    assert sum(path.stat().st_size for path in shards(folder)) <= 8000
    found = [record.tokens[0] for record in read_records(folder, "target")]
    assert found == list(range(found[0], 40)) and len(found) >= 12
    for number, path in enumerate(shards(folder)):
        path.rename(path.with_name(f"{number}-1-1.ids"))  # of 1970
    Recorder(folder, "target", LIMITS).close()
    assert not shards(folder)


def test_nothing_is_kept_longer_than_it_may(folder: Path) -> None:
    """A shard is not written for long, and goes while nothing comes."""
    recorder = Recorder(folder, "target", replace(LIMITS, ttl_s=0.8))
    recorder.offer([1, 2], 1, 0.0)
    while not recorder.num_bytes:
        time.sleep(0.01)
    time.sleep(0.15)
    recorder.offer([3, 4], 1, 0.0)
    while len(shards(folder)) < 2:
        time.sleep(0.01)
    time.sleep(0.8)
    assert not shards(folder)
    recorder.close()


def test_a_rate_is_of_tokens(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second's tokens at once; a long text counts against those after it."""
    now = 100.0
    monkeypatch.setattr(recorders.time, "monotonic", lambda: now)
    recorder = Recorder(folder, "target", replace(LIMITS, max_rate=100.0))
    kept = 0
    for _ in range(400):
        now += 0.05
        kept += 40 * recorder.offer([1] * 40, 1, 0.0)
    assert 2000 <= kept <= 2140
    now += 60.0
    assert [recorder.offer([1] * 350, 1, 0.0) for _ in range(2)] == [True, False]
    now += 2.4
    assert not recorder.offer([1], 0, 0.0)
    now += 0.2
    assert recorder.offer([1], 0, 0.0)
    recorder.close()


def test_a_full_queue_drops(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorders, "MAX_WAITING", 2)
    monkeypatch.setattr(Recorder, "_run", lambda _: None)
    recorder = Recorder(folder, "target", LIMITS)
    assert [recorder.offer([1], 0, 0.0) for _ in range(3)] == [True, True, False]


def test_what_waits_takes_few_bytes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the texts are, until the writer has taken them."""
    may_write = threading.Event()
    write = Recorder._write
    monkeypatch.setattr(Recorder, "_write", lambda *given: may_write.wait() and write(*given))
    recorder = Recorder(folder, "target", replace(LIMITS, max_bytes=1 << 30))
    text = list(range(8000))
    tracemalloc.start()
    kept = sum(recorder.offer(text, 1, 0.0) for _ in range(recorders.MAX_WAITING))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert 200 < kept < 300 and most < 16 << 20
    may_write.set()
    recorder.close()
    assert len(list(read_records(folder, "target"))) == kept
    assert recorder._room == recorders.MAX_WAITING_BYTES


def test_erasing_takes_what_waits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also the text that the writer has in its hands."""
    taken, may_go_on = threading.Event(), threading.Event()
    following = Recorder._next

    def late(recorder: Recorder) -> Any:
        came = following(recorder)
        taken.set()
        may_go_on.wait()
        return came

    monkeypatch.setattr(Recorder, "_next", late)
    recorder = Recorder(folder, "target", LIMITS)
    for number in range(3):
        recorder.offer([number, 1], 1, 0.0)
    taken.wait()
    assert recorder.erase() == 0
    recorder.offer([9, 1], 1, 0.0)
    may_go_on.set()
    recorder.close()
    assert [record.tokens for record in read_records(folder, "target")] == [[9, 1]]


def test_a_full_disk_ends_recording_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Recorder, "_write", full)
    recorder = Recorder(folder, "target", LIMITS)
    assert recorder.offer([1, 2], 1, 0.0)
    while not recorder._is_broken:
        time.sleep(0.001)
    assert not recorder.offer([1, 2], 1, 0.0)
    recorder.close()
    assert "No space left on device; nothing more is recorded" in caplog.text


def test_a_share_is_of_requests(folder: Path) -> None:
    recorder = Recorder(folder, "target", replace(LIMITS, share=0.25))
    taken = sum(recorder.takes(f"cmpl-{number}") for number in range(4000))
    assert 850 < taken < 1150
    recorder.enable(0.0)
    assert not any(recorder.takes(f"cmpl-{number}") for number in range(4000))
    recorder.enable(60.0)
    recorder.share = 1.0
    assert all(recorder.takes(f"cmpl-{number}") for number in range(4000))
    recorder.close()


def test_folders_of_others_are_refused(tmp_path: Path, folder: Path) -> None:
    for made, mode in ((tmp_path / "open", 0o755), (tmp_path / "group", 0o750)):
        made.mkdir()
        made.chmod(mode)
        with pytest.raises(ConfigError, match="chmod 700"):
            Recorder(made, "target", LIMITS)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="another folder"):
        Recorder(tmp_path / "file", "target", LIMITS)
    Recorder(folder, "target", LIMITS).close()
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigError, match="is no folder of records"):
        list(read_records(tmp_path / "link", "target"))
    with pytest.raises(ConfigError, match="another model"):
        Recorder(folder, "other", LIMITS)
    (folder / MANIFEST).write_text("[]")
    with pytest.raises(ConfigError, match="not a manifest"):
        list(read_records(folder, "target"))


def test_a_shard_that_is_a_link_is_not_followed(tmp_path: Path, folder: Path) -> None:
    Recorder(folder, "target", LIMITS).close()
    (tmp_path / "elsewhere").write_bytes(encoded(RECORDS[0]))
    (folder / "1.ids").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=r"1\.ids"):
        list(read_records(folder, "target"))


def test_targets_are_told_apart(tmp_path: Path) -> None:
    names = ("config.json", "tokenizer.json")
    found = set()
    for texts in (("{}", "[]"), ("{}", "[1]"), ("{ }", "[]")):
        for name, text in zip(names, texts, strict=True):
            (tmp_path / name).write_text(text)
        found.add(target_identity(tmp_path))
    assert len(found) == 3
