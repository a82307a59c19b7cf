"""The llama.cpp benchmark, with a stand-in for llama.cpp, a tiny pair, and a real service."""

import json
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
from pair_service import serving_pair

from benchmarks import llamacpp, llamacpp_process
from benchmarks.llamacpp import Run
from benchmarks.llamacpp_process import Engine
from benchmarks.prompts import token_ids
from specpool.engine.models.embedded_pair import Pair

TOKENS, LONG = 6, "Why? " * 60
SYSTEMS = ("llama.cpp", "plain", "default")


@pytest.fixture
def gguf(tmp_path: Path, tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model file for the stand-in; the service runs in this process, with the tiny pair."""

    async def serve(pair: Pair, engine: Engine, options: Namespace) -> list[dict[str, Any]]:
        prompts = token_ids(pair.target, options.lines)
        async with serving_pair(
            pair.target, pair.draft, {"threads": 1}, max_num_seqs=2, prefix_caching=False
        ) as service:
            return await llamacpp.measure(service.client, engine, prompts, options)

    monkeypatch.setenv("SPECPOOL_LLAMACPP_PYTHON", sys.executable)
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).with_name("stand_ins")))
    monkeypatch.setattr(llamacpp, "embedded_pair", lambda: Pair(*tiny_pair))
    monkeypatch.setattr(llamacpp, "serve", serve)
    (tmp_path / "model.gguf").write_text("GGUF")
    return tmp_path / "model.gguf"


def run_main(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    monkeypatch.setattr("sys.argv", ["llamacpp", *flags])
    llamacpp.main()


def test_all_systems_answer_the_same_prompts(
    gguf: Path, tiny_pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prompts = gguf.with_name("prompts.jsonl")
    texts = ["Why?", "How?", LONG]
    prompts.write_text("\n".join(json.dumps({"id": i, "prompt": text}) for i, text in enumerate(texts)))
    flags = ["--gguf", str(gguf), "--prompts", str(prompts), "--concurrency", "1,2", "--repeats", "2"]
    run_main(monkeypatch, *flags, "--tokens", str(TOKENS), "--output", str(gguf.parent))
    out, table = capsys.readouterr()

    result = json.loads(out.splitlines()[-1])
    assert result == json.loads((gguf.parent / "llamacpp.json").read_text())
    assert (result["xllamacpp"], result["gguf"], result["repeats"]) == ("stand-in", "model.gguf", 2)
    rows = result["rows"]
    assert [(row["concurrency"], row["system"]) for row in rows] == [(c, system) for c in (1, 2) for system in SYSTEMS]
    for row in rows:
        assert row["tokens_per_s"] > 0
        assert row["ratio_min"] <= row["ratio"] <= row["ratio_max"]
        if row["system"] == "llama.cpp":
            assert (row["ratio"], row["same_tokens"]) == (1, 1)
        assert f"│ {row['concurrency']}       │ {row['system']}" in table
    assert all(heading in table for heading in llamacpp.HEADINGS.values())

    seen = [json.loads(line) for line in gguf.with_suffix(".seen").read_text().splitlines()]
    servers, requests = [each for each in seen if "model" in each], [each for each in seen if "prompt" in each]
    assert [server["n_parallel"] for server in servers] == [1, 2]
    assert {server["cpuparams"]["n_threads"] for server in servers} == {result["threads"]}
    first, second, third = token_ids(tiny_pair[0], llamacpp.parse(flags).lines[:3])
    asked = [request["prompt"] for request in requests]
    assert len(asked) == 2 * 3 * 4  # concurrencies, turns, prompts
    assert sorted(asked[:4]) == sorted([first, second, third, first])
    assert {(each["n_predict"], each["ignore_eos"], each["cache_prompt"]) for each in requests} == {
        (TOKENS, True, False)
    }


def test_ratios_are_taken_within_a_turn_after_the_first() -> None:
    def turn(theirs: float, ours: float) -> dict[str, Run]:
        return {"llama.cpp": Run([[1, 2, 3, 4]], theirs), "plain": Run([[1, 2, 4, 4]], ours)}

    row = llamacpp.summary(4, "plain", [turn(100, 1), turn(1, 0.5), turn(2, 2), turn(8, 2)])
    assert [row[name] for name in ("ratio", "ratio_min", "ratio_max")] == [2, 1, 4]
    assert (row["tokens_per_s"], row["same_tokens"]) == (2, 0.5)


def test_same_tokens_end_at_the_first_difference() -> None:
    assert llamacpp.same_tokens([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [5, 5, 6]]) == 0.5
    assert llamacpp.same_tokens([[1, 2]], [[1, 2]]) == 1


def test_unloadable_file_is_named(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gguf.write_text("broken")
    with pytest.raises(SystemExit, match=f"^llamacpp: llama.cpp: {gguf}: Failed to init server$"):
        run_main(monkeypatch, "--gguf", str(gguf))


def test_model_folder_must_have_one_gguf_file(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=r"has 0 GGUF files instead of one"):
        llamacpp_process.only_gguf(tmp_path)
    (tmp_path / "a.gguf").touch()
    assert llamacpp_process.only_gguf(tmp_path) == tmp_path / "a.gguf"
    (tmp_path / "b.gguf").touch()
    with pytest.raises(RuntimeError, match="has 2 GGUF files"):
        llamacpp_process.only_gguf(tmp_path)
