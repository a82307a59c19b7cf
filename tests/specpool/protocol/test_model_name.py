"""The readable name of a model."""

import pytest

from specpool.protocol.worker_info import readable_name


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("gpt2", "gpt2"),
        ("/models/qwen", "qwen"),
        ("/models/qwen/", "qwen"),
        ("./qwen", "qwen"),
        ("../qwen", "qwen"),
        ("../models/some/qwen.gguf", "qwen"),
        ("Qwen3-8B-Q4_K_M.gguf", "Qwen3-8B-Q4_K_M"),
        ("/cache/hub/models--Qwen--Qwen3-8B/snapshots/b968826d9c46dd6066d109eabc6255188de91218", "Qwen/Qwen3-8B"),
        ("/", "/"),
    ],
)
def test_the_name_is_the_hub_id_or_the_end_of_the_path(model: str, name: str) -> None:
    assert readable_name(model) == name
