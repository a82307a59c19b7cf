"""The equality benchmark compares a tiny model with either reference."""

import json
import re

import pytest
import torch
from tiny_models import round_weights, save_model
from tiny_pair import tiny_config

from benchmarks import equality
from benchmarks.peers import Peers
from specpool.v1 import common_pb2

ARGUMENTS = ["--num-prompts", "2", "--max-tokens", "6", "--concurrency", "2", "--k", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target that is its own draft, stored in bfloat16."""
    folder = tmp_path_factory.mktemp("equality")
    return str(round_weights(save_model(folder, tiny_config(max_position_embeddings=2048))))


@pytest.mark.rehearsal
@pytest.mark.parametrize("reference", ["float32", "served"])
def test_answers_are_compared_with_the_reference(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], reference: str
) -> None:
    flags = ["--target", model, "--draft", model, *ARGUMENTS, "--reference", reference]
    monkeypatch.setattr("sys.argv", ["equality", *flags])
    equality.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    place = r"float32 on cpu|bfloat16 on cuda:\d+" if reference == "served" else "float32 on cpu"
    assert re.fullmatch(f"transformers, ({place})", result["reference"])
    assert result["exact_match_generate"] == 1 - len(result["differences"]) / result["prompts"]
    if "bfloat16" not in result["reference"]:
        assert (result["exact_match_alone"], result["differences"]) == (1, [])


@pytest.mark.rehearsal
def test_activations_that_the_target_cannot_have_are_refused(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--target", model, "--draft", model, *ARGUMENTS, "--activations", "int8"]
    monkeypatch.setattr("sys.argv", ["equality", *flags])
    with pytest.raises(SystemExit, match="2"):
        equality.main()
    refusal = capsys.readouterr().err.splitlines()[-1]
    assert refusal.startswith("equality: error: ")
    assert "activations: int8 needs a trained draft, or a GGUF file" in refusal


def test_reference_runs_where_the_target_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equality, "use_device", torch.device)
    info = common_pb2.ModelInfo(device="cuda:1 (NVIDIA H200)", dtype="bfloat16")
    assert equality.reference_place("served", info) == (torch.device("cuda:1"), torch.bfloat16)
    assert equality.reference_place("float32", info) == (torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_reference_has_the_dtype_of_the_target(model: str, dtype: torch.dtype) -> None:
    peers = Peers(model, torch.device("cpu"), dtype)
    assert {weight.dtype for weight in peers.model.parameters()} == {dtype}
    assert [len(answer) for answer in peers.generate(["Once upon a time"], 1, 5)] == [5]
    assert peers.margin(peers.encode("Once upon a time")) >= 0


@pytest.mark.parametrize(
    ("answer", "tokens", "position"), [([1, 2, 3], [1, 5, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [4], 0)]
)
def test_first_difference(answer: list[int], tokens: list[int], position: int) -> None:
    assert equality.first_difference(answer, tokens) == position
