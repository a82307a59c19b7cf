"""Shards on a real disk: bounds, permissions, failures and a killed process."""

import errno
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from coordinator.recording import shard_writer
from coordinator.recording.shard_writer import Bounds, ShardWriter
from specpool.protocol.recordings import Header, RecordedAnswer, read_shard, shards_in

HEADER = Header("model", "tokenizer", "weights")
BOUNDS = Bounds(max_bytes=16_000, max_age_seconds=3600.0)
DAY = 86_400.0


def answer(number: int) -> RecordedAnswer:
    return RecordedAnswer("c", (number, *range(30)))


def recorded(folder: Path) -> set[RecordedAnswer]:
    return {each for path in shards_in(folder) for each in (read_shard(path) or (HEADER, []))[1]}


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in shards_in(folder))


def test_answers_are_private_and_readable_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    writer = ShardWriter(folder, BOUNDS)
    writer.append(HEADER, answer(1))
    assert recorded(folder) == {answer(1)}
    (unfinished,) = shards_in(folder)
    writer.finish()
    (finished,) = shards_in(folder)
    assert unfinished.name == f"{finished.name}.part"
    assert recorded(folder) == {answer(1)}
    assert folder.stat().st_mode & 0o777 == 0o700
    assert finished.stat().st_mode & 0o777 == 0o600


def test_the_oldest_answers_are_deleted_first(tmp_path: Path) -> None:
    writers = [ShardWriter(tmp_path, BOUNDS) for _ in range(2)]
    for number in range(400):
        writers[number % 2].append(HEADER, answer(number))
        assert size_of(tmp_path) <= BOUNDS.max_bytes + BOUNDS.shard_bytes  # the other writer's shard still grows
    for writer in writers:
        writer.finish()
    kept = sorted(each.token_ids[0] for each in recorded(tmp_path))
    assert kept[0] > 200
    assert kept[-1] == 399
    assert size_of(tmp_path) > BOUNDS.max_bytes / 2


def test_old_shards_are_deleted_without_new_answers(tmp_path: Path) -> None:
    other = tmp_path / "answers-of-a-killed-process.jsonl.part"
    other.write_bytes(HEADER.encode() + answer(1).encode())
    (tmp_path / "notes.txt").touch()
    os.utime(other, (time.time() - DAY,) * 2)
    os.utime(tmp_path / "notes.txt", (time.time() - DAY,) * 2)
    ShardWriter(tmp_path, BOUNDS).tick()
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_no_answer_outlives_the_maximum_age(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    start, passed = time.time(), 0.0
    clock = SimpleNamespace(monotonic=lambda: passed, time=lambda: start + passed)
    monkeypatch.setattr(shard_writer, "time", clock)
    writer = ShardWriter(tmp_path, BOUNDS)
    writer.append(HEADER, answer(1))
    while shards_in(tmp_path):
        assert passed <= BOUNDS.max_age_seconds
        finished = passed >= BOUNDS.shard_seconds
        assert shards_in(tmp_path)[0].name.endswith(".jsonl" if finished else ".part")
        passed += BOUNDS.shard_seconds
        writer.tick()
    assert passed > BOUNDS.max_age_seconds / 2


def test_shards_that_another_coordinator_deletes_are_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = tmp_path / "answers-1.jsonl"
    monkeypatch.setattr(shard_writer, "shards_in", lambda folder: [missing, *shards_in(folder)])
    writer = ShardWriter(tmp_path, BOUNDS)
    writer.append(HEADER, answer(1))
    writer.finish()
    assert recorded(tmp_path) == {answer(1)}


def test_a_deleted_directory_costs_only_what_it_held(tmp_path: Path) -> None:
    folder = tmp_path / "answers"
    writer = ShardWriter(folder, BOUNDS)
    writer.append(HEADER, answer(1))
    shutil.rmtree(folder)
    writer.append(HEADER, answer(2))
    assert recorded(folder) == {answer(2)}
    shutil.rmtree(folder)
    writer.finish()


def test_a_clock_that_is_set_back_does_not_keep_answers(tmp_path: Path) -> None:
    shard = tmp_path / "answers-1.jsonl"
    shard.write_bytes(HEADER.encode() + answer(1).encode())
    os.utime(shard, (time.time() + DAY,) * 2)
    ShardWriter(tmp_path, BOUNDS).tick()
    assert not shard.exists()


def test_only_files_count_and_are_deleted(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes(bytes(2 * BOUNDS.max_bytes))
    folder = tmp_path / "answers"
    folder.mkdir()
    (folder / "answers-link.jsonl").symlink_to(outside)
    (folder / "answers-folder.jsonl").mkdir()
    os.utime(folder / "answers-folder.jsonl", (time.time() - DAY,) * 2)
    writer = ShardWriter(folder, BOUNDS)
    for number in (1, 2):
        writer.append(HEADER, answer(number))
        writer.finish()
    assert len([path for path in folder.iterdir() if path.is_file() and not path.is_symlink()]) == 2
    assert outside.stat().st_size == 2 * BOUNDS.max_bytes


def test_a_shard_never_mixes_targets_and_a_restart_continues(tmp_path: Path) -> None:
    other = Header("model", "tokenizer", "other weights")
    writer = ShardWriter(tmp_path, BOUNDS)
    writer.append(HEADER, answer(1))
    writer.append(other, answer(2))
    writer.finish()
    writer = ShardWriter(tmp_path, BOUNDS)
    writer.append(HEADER, answer(3))
    writer.finish()
    shards = [shard for path in shards_in(tmp_path) if (shard := read_shard(path)) is not None]
    assert sorted(shards, key=lambda shard: shard[1][0].token_ids) == [
        (HEADER, [answer(1)]),
        (other, [answer(2)]),
        (HEADER, [answer(3)]),
    ]


def test_a_deleted_shard_is_replaced(tmp_path: Path) -> None:
    writer = ShardWriter(tmp_path / "folder", BOUNDS)
    for number in range(2):
        writer.append(HEADER, answer(number))
        assert recorded(tmp_path / "folder") == {answer(number)}
        shutil.rmtree(tmp_path / "folder")
    writer.finish()


def test_a_full_disk_loses_only_new_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer, real = ShardWriter(tmp_path, BOUNDS), os.open
    writer.append(HEADER, answer(1))

    def open_full(path: Path, flags: int, mode: int = 0o777) -> int:
        os.close(real(path, flags, mode))
        return real("/dev/full", os.O_WRONLY)

    writer.finish()
    with monkeypatch.context() as patched:
        patched.setattr(os, "open", open_full)
        for number in (2, 3):
            with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
                writer.append(HEADER, answer(number))
    writer.append(HEADER, answer(4))
    writer.finish()
    assert recorded(tmp_path) == {answer(1), answer(4)}
    assert len(shards_in(tmp_path)) == 2


def test_answers_before_a_partly_written_line_stay_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import resource

    writer = ShardWriter(tmp_path, BOUNDS)
    writer.append(HEADER, answer(1))
    before, limits = size_of(tmp_path), resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (before + 20, limits[1]))
    try:
        with pytest.raises(OSError, match=os.strerror(errno.EFBIG)):
            writer.append(HEADER, answer(2))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, previous)
    assert size_of(tmp_path) == before + 20
    writer.append(HEADER, answer(3))
    writer.finish()
    assert recorded(tmp_path) == {answer(1), answer(3)}


def test_a_killed_process_leaves_complete_answers(tmp_path: Path) -> None:
    script = f"""
from pathlib import Path
from coordinator.recording.shard_writer import Bounds, ShardWriter
from specpool.protocol.recordings import Header, RecordedAnswer
writer, number = ShardWriter(Path({str(tmp_path)!r}), Bounds(2**20, 3600.0)), 0
while True:
    writer.append(Header("model", "tokenizer", "weights"), RecordedAnswer("c", (number, *range(30))))
    print(number, flush=True)
    number += 1
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        written = [int(process.stdout.readline()) for _ in range(100)]
        process.kill()
    found = sorted(each.token_ids[0] for each in recorded(tmp_path))
    assert found == list(range(len(found)))
    assert len(found) >= len(written)
