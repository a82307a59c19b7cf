"""The benchmark of equality: a tiny model is compared with either reference, to the end."""

import json
import re

import pytest
import torch
from tiny_models import round_weights, save_model
from tiny_pair import tiny_config

from benchmarks import equality
from benchmarks.peers import Peers
from specpool.v1 import common_pb2

PROMPT = "Once upon a time"
ARGUMENTS = ["--num-prompts", "2", "--max-tokens", "6", "--concurrency", "2", "--k", "2"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A target that is its own draft, stored in bfloat16."""
    folder = tmp_path_factory.mktemp("equality")
    return str(round_weights(save_model(folder, tiny_config(max_position_embeddings=2048))))


@pytest.mark.rehearsal
@pytest.mark.parametrize(
    ("flags", "reference"),
    [
        ([], "float32 on cpu"),
        (["--reference", "served"], r"float32 on cpu|bfloat16 on cuda:\d+"),
    ],
    ids=["default", "served"],
)
def test_answers_are_compared_with_the_reference(
    model: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    reference: str,
) -> None:
    monkeypatch.setattr("sys.argv", ["equality", "--target", model, "--draft", model, *ARGUMENTS, *flags])
    equality.main()
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert re.fullmatch(f"transformers, ({reference})", result["reference"])
    assert result["exact_match_generate"] == 1 - len(result["differences"]) / result["prompts"]
    if "bfloat16" not in result["reference"]:
        assert (result["exact_match_alone"], result["differences"]) == (1, [])


def test_a_reference_may_run_where_the_target_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(equality, "use_device", torch.device)
    info = common_pb2.ModelInfo(device="cuda:1 (NVIDIA H200)", dtype="bfloat16")
    assert equality.reference_place("served", info) == (torch.device("cuda:1"), torch.bfloat16)
    assert equality.reference_place("float32", info) == (torch.device("cpu"), torch.float32)


def test_the_reference_may_have_the_dtype_of_what_is_served(model: str) -> None:
    usual, served = Peers(model), Peers(model, torch.device("cpu"), torch.bfloat16)
    assert {weight.dtype for weight in usual.model.parameters()} == {torch.float32}
    assert {weight.dtype for weight in served.model.parameters()} == {torch.bfloat16}
    for peers in (usual, served):
        (answer,) = peers.generate([PROMPT], 1, 5)
        assert len(answer) == 5
        assert peers.margin(peers.encode(PROMPT)) >= 0


@pytest.mark.parametrize(
    ("answer", "tokens", "position"), [([1, 2, 3], [1, 5, 3], 1), ([1, 2], [1, 2, 3], 2), ([], [4], 0)]
)
def test_a_difference_begins_where_answers_part_or_where_one_ends(
    answer: list[int], tokens: list[int], position: int
) -> None:
    assert equality.first_difference(answer, tokens) == position


def test_an_unknown_reference_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["equality", "--reference", "gpu"])
    with pytest.raises(SystemExit):
        equality.main()
    assert "--reference" in capsys.readouterr().err.splitlines()[-1]
