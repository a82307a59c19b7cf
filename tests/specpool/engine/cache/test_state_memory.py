"""Memory limits include the recurrent states of all sequences."""

from pathlib import Path

import pytest
import torch
from delta_nets import save_delta_net, save_recurrent
from tiny_models import load_engine, refusal

from specpool.engine.cache.layout import PAGE_SIZE
from specpool.engine.cache.memory import readable
from specpool.engine.cache.recurrent import tail_rows
from specpool.engine.config.options import EngineOptions
from specpool.engine.config.recurrent_sizes import RecurrentSizes
from specpool.engine.config.target_options import TargetOptions
from specpool.engine.models.preflight import InvalidOptionError, check_options
from specpool.engine.run.engine import Engine
from target_worker.loading import load_pair

CHUNK = 64
"""Rows of a chunk of transformers' gated delta nets."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_delta_net(tmp_path_factory.mktemp("delta_net"))


def states_of(engine: Engine) -> int:
    arena = engine.layout.arena.recurrent
    assert arena is not None
    return sum(each.nbytes for each in (arena.states, arena.edges, arena.inputs, arena.gates))


def test_a_sequence_takes_little_more_than_a_state_and_its_chunk() -> None:
    """With the sizes of Qwen3.5-0.8B."""
    sizes = RecurrentSizes(18, state=(16, 128, 128), inputs=3 * 16 * 128, taps=4, gates=2 * 16)
    least = sizes.checkpoint_bytes(torch.float32.itemsize) + sizes.tails_bytes(torch.float32.itemsize, CHUNK) / 2
    assert sizes.sequence_bytes(torch.float32.itemsize, tail_rows(PAGE_SIZE)) <= 1.5 * least


@pytest.mark.parametrize("option", ["kv_memory", "memory_budget"])
def test_limits_include_states(folder: Path, option: str, caplog: pytest.LogCaptureFixture) -> None:
    options = {"max_model_len": 64, "native": False, "max_sequences": 2}
    whole = load_engine(folder, **options).footprint
    least = whole.states + whole.kv // 2 + (0 if option == "kv_memory" else whole.weights + whole.activations)
    caplog.set_level("INFO")
    engine = load_engine(folder, **options, **{option: least})
    assert (engine.footprint.kv, engine.footprint.states) == (whole.kv // 2, whole.states)
    assert states_of(engine) == whole.states
    assert f"states {readable(whole.states)}" in caplog.text
    message = refusal(folder, **options, **{option: least - 1})
    assert f"less {readable(whole.states)} of recurrent states, " in message
    assert ",," not in message
    assert f"lower --max-sequences or --max-model-len, or raise --{option.replace('_', '-')} to " in message


@pytest.mark.parametrize("name", ["qwen3_next", "qwen3_5_text", "lfm2_moe", "kimi_linear"])
def test_states_are_counted_before_loading(tmp_path: Path, name: str) -> None:
    """The first check includes exactly the states and positions that loading reserves."""
    options = {"max_model_len": 64, "native": False, "max_sequences": 3, "dtype": "float32", "device": "cpu"}
    info = load_engine(save_recurrent(tmp_path, name), **options).info()
    least = info.state_bytes_total + 64 * info.kv_bytes_per_token
    check_options(EngineOptions(model=str(tmp_path), kv_memory=least, **options))
    with pytest.raises(InvalidOptionError, match=r"kv-memory: .* and the recurrent states of 3 sequences, which need"):
        check_options(EngineOptions(model=str(tmp_path), kv_memory=least - 1, **options))


@pytest.mark.parametrize("option", ["kv_memory", "memory_budget", "draft_kv_memory"])
def test_pairs_divide_what_the_states_of_both_leave(folder: Path, option: str) -> None:
    """`kv_memory` sizes the target's cache alone, and `draft_kv_memory` the draft's."""
    options = {"model": str(folder), "draft": str(folder), "threads": 1, "max_sequences": 2, "max_model_len": 64}

    def load(**limits: int) -> tuple[Engine, Engine]:
        return load_pair(
            TargetOptions(**options, device="cpu", **limits), startup_cache=False, report=lambda phase: None
        )

    target, draft = (engine.footprint for engine in load())
    one, caches = target.kv // 2, target.kv // 2 + target.states
    both = target.weights + draft.weights + max(target.activations, draft.activations) + 2 * caches
    limits = {
        "kv_memory": ({"kv_memory": caches}, [one, one]),
        "memory_budget": ({"memory_budget": both}, [one, one]),
        "draft_kv_memory": ({"draft_kv_memory": caches, "memory_budget": both}, [one, one]),
    }
    limit, expected = limits[option]
    engines = load(**limit)
    assert [engine.footprint.kv for engine in engines] == expected
    assert [states_of(engine) for engine in engines] == [target.states, draft.states]
