"""Devices: which one a setting names, and that weights are read right onto it. CUDA is imitated; none is needed."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_models import save_model
from tiny_pair import tiny_config
from transformers import AutoModelForCausalLM

from specpool.engine.config.devices import pick_device
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.sources import UnsupportedModelError
from specpool.engine.models import loading
from specpool.engine.models.loading import load_model
from specpool.engine.startup.loading import load_engine

COUNT, CURRENT = 2, 1


class ReadWeights(Exception):
    """Reading weights is the first thing that needs a GPU."""


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A machine with `COUNT` GPUs, as torch presents them; `current` is the device that was set last."""
    machine = SimpleNamespace(current=CURRENT, count=COUNT)

    def set_device(device: torch.device) -> None:
        if device.index is None:  # as the real one does
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
        "get_device_name": lambda device: "Imitated GPU",
        "mem_get_info": lambda device: (2**30, 2**31),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(torch, "empty", empty)
    return machine


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments with which weights would be read."""
    arguments: dict[str, Any] = {}

    def from_pretrained(**given: Any) -> None:
        arguments.update(given)
        raise ReadWeights

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    return arguments


@pytest.mark.parametrize(
    ("wanted", "index"), [("cuda", CURRENT), ("auto", CURRENT), ("cuda:0", 0), ("cuda:1", 1)], ids=str
)
@pytest.mark.parametrize(
    "load", [load_model, lambda options: load_engine(options, exact=True)], ids=["model", "engine"]
)
def test_a_worker_on_a_gpu_reads_its_weights_right_onto_it(
    tiny_pair: tuple[Path, Path], gpus: SimpleNamespace, read: dict[str, Any], wanted: str, index: int, load: Any
) -> None:
    device = torch.device("cuda", index)
    assert pick_device(wanted) == device
    with pytest.raises(UnsupportedModelError, match="ReadWeights"):
        load(EngineOptions(model=str(tiny_pair[0]), device=wanted))
    assert gpus.current == index
    assert read["device_map"] == {"": device}
    assert read["dtype"] == torch.float32  # as stored
    assert read["output_loading_info"]
    assert read["ignore_mismatched_sizes"]


@pytest.mark.parametrize("wanted", ["cpu", "auto"])
def test_without_a_gpu_weights_are_read_by_the_cpu(
    tiny_pair: tuple[Path, Path], gpus: SimpleNamespace, read: dict[str, Any], wanted: str
) -> None:
    gpus.count = 0
    with pytest.raises(UnsupportedModelError, match="ReadWeights"):
        load_model(EngineOptions(model=str(tiny_pair[0]), device=wanted))
    assert "device_map" not in read


@pytest.mark.parametrize(("count", "names"), [(1, "cuda:0"), (2, "cuda:0 to cuda:1")])
def test_a_gpu_beyond_those_that_are_there_is_refused_in_one_line(
    tiny_pair: tuple[Path, Path], gpus: SimpleNamespace, count: int, names: str
) -> None:
    gpus.count = count
    with pytest.raises(UnsupportedModelError) as caught:
        load_model(EngineOptions(model=str(tiny_pair[0]), device="cuda:2"))
    assert str(caught.value) == f"device cuda:2 cannot be used: this machine has {names}"


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_a_device_map_gives_the_same_weights(tmp_path: Path, stored: torch.dtype, tied: bool) -> None:
    config = tiny_config(tie_word_embeddings=tied)
    folder = save_model(tmp_path, config)
    AutoModelForCausalLM.from_pretrained(folder, dtype=stored).save_pretrained(folder, max_shard_size="200KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    usual = load_model(EngineOptions(model=str(folder), device="cpu"))
    mapped, report = loading.read_weights(
        str(folder), usual.config, torch.device("cpu"), torch.float32, device_map={"": torch.device("cpu")}
    )
    weights = mapped.state_dict()
    assert weights.keys() == usual.model.state_dict().keys()
    assert all(torch.equal(weights[name], weight) for name, weight in usual.model.state_dict().items())
    assert not report["missing_keys"]
    assert not report["mismatched_keys"]
    assert (mapped.lm_head.weight is mapped.get_input_embeddings().weight) == tied


def test_a_device_map_still_reports_weights_that_are_missing_or_misshapen(tmp_path: Path) -> None:
    folder = save_model(tmp_path, tiny_config())
    wanted = tiny_config(num_hidden_layers=4, intermediate_size=32)
    wanted.save_pretrained(folder)
    _, report = loading.read_weights(
        str(folder), wanted, torch.device("cpu"), torch.float32, device_map={"": torch.device("cpu")}
    )
    assert "model.layers.3.mlp.down_proj.weight" in report["missing_keys"]
    assert {name for name, *_ in report["mismatched_keys"]} >= {"model.layers.0.mlp.down_proj.weight"}
    with pytest.raises(UnsupportedModelError, match="lack 18 of the weights"):
        loading.refuse_made_up_weights(report)
