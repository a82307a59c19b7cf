"""Devices are resolved by name, and weights are read straight onto them. CUDA is faked."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import save_model
from tiny_pair import tiny_config
from transformers import AutoModelForCausalLM

from specpool.engine.config.devices import pick_device, pick_rank_devices
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models import weights
from specpool.engine.models.loading import load_model
from specpool.engine.models.weights import read_weights
from specpool.engine.startup.loading import load_engine

COUNT, CURRENT = 2, 1


class ReadWeights(Exception):
    """Raised instead of reading weights, the first step that needs a GPU."""


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with `COUNT` GPUs; `current` is the device that was set last."""
    machine = SimpleNamespace(current=CURRENT, count=COUNT)

    def set_device(device: torch.device) -> None:
        if device.index is None:  # like the real one
            raise ValueError(f"Expected a torch.device with a specified index or an integer, but got: {device}")
        machine.current = device.index

    real_empty = torch.empty

    def empty(*sizes: Any, device: Any = None, **more: Any) -> torch.Tensor:
        on_gpu = torch.device(device or "cpu").type == "cuda"
        if on_gpu and (torch.device(device).index or 0) >= machine.count:
            raise RuntimeError("CUDA error: invalid device ordinal\nCUDA kernel errors might be reported later.")
        return real_empty(*sizes, device="cpu" if on_gpu else device, **more)

    fakes: dict[str, Any] = {
        "is_available": lambda: machine.count > 0,
        "device_count": lambda: machine.count,
        "current_device": lambda: machine.current,
        "set_device": set_device,
        "get_device_name": lambda device: "Fake GPU",
        "mem_get_info": lambda device: (2**30, 2**31),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "empty", empty)
    return machine


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments for reading weights."""
    arguments: dict[str, Any] = {}

    def from_pretrained(**keywords: Any) -> None:
        arguments.update(keywords)
        raise ReadWeights

    monkeypatch.setattr(weights.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    return arguments


@pytest.mark.parametrize(("name", "index"), [("cuda", CURRENT), ("auto", CURRENT), ("cuda:0", 0), ("cuda:1", 1)])
@pytest.mark.parametrize(
    "load", [load_model, lambda options: load_engine(options, exact=True)], ids=["model", "engine"]
)
def test_weights_are_read_onto_the_gpu(
    tiny_pair: tuple[Path, Path], gpus: SimpleNamespace, read: dict[str, Any], name: str, index: int, load: Any
) -> None:
    device = torch.device("cuda", index)
    assert pick_device(name) == device
    with pytest.raises(UnsupportedModelError, match="ReadWeights"):
        load(EngineOptions(model=str(tiny_pair[0]), device=name))
    assert gpus.current == index
    assert read["device_map"] == {"": device}
    assert read["dtype"] == torch.float32  # as stored
    assert read["output_loading_info"]
    assert read["ignore_mismatched_sizes"]


def test_auto_is_the_cpu_without_a_gpu(
    tiny_pair: tuple[Path, Path], gpus: SimpleNamespace, read: dict[str, Any]
) -> None:
    gpus.count = 0
    with pytest.raises(UnsupportedModelError, match="ReadWeights"):
        load_model(EngineOptions(model=str(tiny_pair[0]), device="auto"))
    assert "device_map" not in read


@pytest.mark.parametrize(
    ("name", "count", "reason"),
    [
        ("cuda:2", 1, "this machine has cuda:0"),
        ("cuda:2", 2, "this machine has cuda:0 to cuda:1"),
        ("no such device", 2, 'it must be "auto", "cpu", "cuda" or "cuda:N"'),
        ("cuda:0", 0, "CUDA error: invalid device ordinal"),
    ],
)
def test_missing_and_unknown_devices_are_refused(gpus: SimpleNamespace, name: str, count: int, reason: str) -> None:
    gpus.count = count
    with pytest.raises(UnsupportedModelError) as caught:
        pick_device(name)
    assert str(caught.value) == f"device {name} cannot be used: {reason}"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"device": "auto"}, ["cuda:0", "cuda:1"]),
        ({"device": "cuda:1, cuda:0"}, ["cuda:1", "cuda:0"]),
        ({"device": "cpu"}, ["cpu", "cpu"]),
        ({"device": "cpu,cpu,cpu"}, "device names 3 devices for 2 ranks: cpu,cpu,cpu"),
        ({"device": "cuda:0,cpu"}, "ranks must be all on GPUs or all on the CPU, not on cuda:0,cpu"),
        ({"device": "cuda:0,cuda:0"}, "each rank needs a GPU of its own, not cuda:0,cuda:0"),
        ({"device": "cuda:0"}, "device cuda:0 is one GPU for 2 ranks: name one per rank"),
        ({"device": "cpu,gpu"}, "device gpu cannot be used"),
        ({"device": "cuda", "tensor_parallel": 3}, "tensor-parallel: 3 ranks need 3 GPUs, but this machine has 2"),
    ],
)
@pytest.mark.usefixtures("gpus")
def test_ranks_get_devices(options: dict[str, Any], expected: list[str] | str) -> None:
    parallel = EngineOptions(**{"model": "m", "tensor_parallel": 2, **options})
    if isinstance(expected, str):
        with pytest.raises(UnsupportedModelError, match=expected):
            pick_rank_devices(parallel)
    else:
        assert pick_rank_devices(parallel) == expected


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_device_map_gives_the_same_weights(tmp_path: Path, stored: torch.dtype, tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied)
    folder = save_model(tmp_path, config)
    AutoModelForCausalLM.from_pretrained(folder, dtype=stored).save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    usual = load_model(EngineOptions(model=str(folder), device="cpu"))
    mapped, report = read_weights(
        str(folder), usual.config, torch.device("cpu"), torch.float32, device_map={"": torch.device("cpu")}
    )
    tensors = mapped.state_dict()
    assert tensors.keys() == usual.model.state_dict().keys()
    assert all(torch.equal(tensors[name], weight) for name, weight in usual.model.state_dict().items())
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    assert (mapped.lm_head.weight is mapped.get_input_embeddings().weight) == tied
