"""The file format of recorded answers: round trips, truncation, and damaged files."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specpool.protocol.recordings import Header, InvalidShardError, RecordedAnswer, read_shard, shards_in

answers = st.lists(
    st.builds(RecordedAnswer, st.text(), st.lists(st.integers(0, 2**32 - 1)).map(tuple)), max_size=5
)  # fmt: skip
HEADER = Header("mo\ndel", "tokenizer", "weights")


@pytest.fixture(scope="module")
def shard(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("recording") / "answers-0.jsonl"


@given(written=answers, data=st.data())
def test_a_shard_is_readable_up_to_the_last_whole_line(
    shard: Path, written: list[RecordedAnswer], data: st.DataObject
) -> None:
    lines = [HEADER.encode(), *(answer.encode() for answer in written)]
    content = b"".join(lines)
    size = data.draw(st.integers(0, len(content)))
    shard.write_bytes(content[:size])
    whole = content[:size].count(b"\n")
    assert read_shard(shard) == ((HEADER, written[: whole - 1]) if whole else None)


@given(content=st.binary(max_size=60), after=st.sampled_from([b"", HEADER.encode()]))
def test_errors_of_damaged_shards_name_the_file(shard: Path, content: bytes, after: bytes) -> None:
    shard.write_bytes(after + content.replace(b"{", b"[") + b"\n")
    with pytest.raises(InvalidShardError, match=str(shard)):
        read_shard(shard)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (b'{"a": 1}', "is not a shard of recorded answers"),
        (b'{"format": "specpool-answers", "version": 2}', "has version 2 of the format, but this release reads 1"),
        (b'{"format": "specpool-answers", "version": 1, "model": "m"}', "line 1: invalid header"),
    ],
)
def test_other_headers_are_refused(shard: Path, line: bytes, message: str) -> None:
    shard.write_bytes(line + b"\n")
    with pytest.raises(InvalidShardError, match=message):
        read_shard(shard)


@pytest.mark.parametrize("token_ids", ["[-1]", "[4294967296]", "[true]", "[1.5]", '["1"]', "1", "[[1]]"])
def test_errors_of_invalid_token_ids_name_the_line(shard: Path, token_ids: str) -> None:
    shard.write_bytes(HEADER.encode() + f'{{"client":"","token_ids":{token_ids}}}\n'.encode())
    with pytest.raises(InvalidShardError, match="line 2: not a recorded answer"):
        read_shard(shard)


def test_other_files_are_not_shards(tmp_path: Path) -> None:
    for name in ("answers-1.jsonl", "answers-2.jsonl.part", "answers-3.json", "notes.jsonl"):
        (tmp_path / name).touch()
    assert [path.name for path in shards_in(tmp_path)] == ["answers-1.jsonl", "answers-2.jsonl.part"]
