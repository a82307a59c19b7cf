"""Sharded engines give the bits of one device, or are batch-invariant."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from gguf_files import save_random_gguf
from ranks_in_turns import GroupInTurns, run_ranks
from tiny_models import load_engine, random_tokens, refusal, rows_that_differ, save_model, small_config

from specpool.engine.cache.spans import Span
from specpool.engine.config.options import Activations, EngineOptions
from specpool.engine.models.config import load_config
from specpool.engine.models.facts import weights_fingerprint
from specpool.engine.models.loading import load_model
from specpool.engine.passes.fused import FusedModel
from specpool.engine.passes.native.packed_weights import resolve_activations
from specpool.engine.passes.native.sharded import ShardedNativeModel
from specpool.engine.run.engine import Engine
from specpool.engine.sharding.shares import Share, shard

TOKENS = random_tokens(90)
UNEVEN = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}


@contextmanager
def sharded(folder: Path, ranks: int, **options: Any) -> Iterator[Engine]:
    engine = load_engine(folder, device="cpu", tensor_parallel=ranks, **options)
    try:
        yield engine
    finally:
        engine.close()


def logits(engine: Engine) -> torch.Tensor:
    """Logits of a prompt in two passes of two sequences, whose pages alternate, and of a branch."""
    first = engine.forward([Span(0, 0, TOKENS[:40], 3), Span(1, 0, TOKENS[50:53], 1)])
    passes = [first, engine.forward([Span(0, 30, TOKENS[30:80], 50), Span(1, 3, TOKENS[5:9], 2)])]
    if engine.supports_branches:
        passes.append(engine.forward([Span(0, 35, TOKENS[3:9], 6, 35, offset=50), Span(1, 7, TOKENS[:1], 1)]))
    return torch.cat(passes)


@pytest.mark.parametrize(
    ("architecture", "ranks", "changes"),
    [
        ("llama", 2, {**UNEVEN, "attention_bias": True, "mlp_bias": True}),
        pytest.param("qwen3", 3, {**UNEVEN, "tie_word_embeddings": True}, marks=pytest.mark.slow),
        pytest.param("glm4", 2, {"attention_bias": True}, marks=pytest.mark.slow),
        # Not whole vectors, so not compiled.
        pytest.param("llama", 2, {"intermediate_size": 100}, marks=pytest.mark.slow),
    ],
)
def test_sharded_engine_matches_one_device_bit_for_bit(
    architecture: str, ranks: int, changes: dict[str, Any], tmp_path: Path
) -> None:
    folder = save_model(tmp_path, small_config(architecture, **changes))
    alone = load_engine(folder, device="cpu")
    with sharded(folder, ranks) as engine:
        assert type(engine.forward_pass).__name__.removeprefix("Sharded") == type(alone.forward_pass).__name__
        assert engine.bitwise
        assert torch.equal(logits(engine), logits(alone))
        assert rows_that_differ(engine) == 0
        assert engine.numerics_fingerprint == alone.numerics_fingerprint
        assert engine.weights_fingerprint == alone.weights_fingerprint


@pytest.mark.slow
@pytest.mark.parametrize(
    ("architecture", "options", "forward_pass"),
    [("glm4", {"tensor_parallel_sums": "parts"}, "ShardedNativeModel"), ("llama", {"native": False}, "FusedModel")],
)
def test_partial_sums_and_the_torch_pass_are_batch_invariant(
    architecture: str, options: dict[str, Any], forward_pass: str, tmp_path: Path
) -> None:
    folder = save_model(tmp_path, small_config(architecture, **UNEVEN, attention_bias=True, mlp_bias=True))
    alone = load_engine(folder, device="cpu")
    with sharded(folder, 2, **options) as engine:
        assert type(engine.forward_pass).__name__ == forward_pass
        assert engine.bitwise
        assert rows_that_differ(engine) == 0
        ours = logits(engine)  # without the branch if the pass has none
        assert torch.allclose(ours, logits(alone)[: len(ours)], rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@pytest.mark.parametrize("sums", ["whole", "parts"])
def test_ranks_keep_weights_quantized(tmp_path: Path, sums: Literal["whole", "parts"]) -> None:
    """With partial sums, a rank of this model has 48 inputs. Those are not whole blocks, so they are dequantized."""
    changes = {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 4}
    file = save_random_gguf(tmp_path, lambda name: "Q4_1" if "layers" in name else "Q8_0", **changes)
    dense = load_engine(file, device="cpu", weights="float32")
    with sharded(file, 2, tensor_parallel_sums=sums, activations="float32") as engine:
        assert isinstance(engine.forward_pass, ShardedNativeModel)
        kinds = engine.forward_pass.kinds
        assert kinds.keys() - {"FLOAT32"} == {"Q4_1", "Q8_0"}
        down = 2 * 4 * 128 * 48
        assert (kinds.get("FLOAT32", 0) >= down) == (sums == "parts")
        assert engine.bitwise
        assert rows_that_differ(engine) == 0
        assert engine.weights_fingerprint == dense.weights_fingerprint
        if sums == "whole":
            assert torch.equal(logits(engine), logits(dense))
            assert engine.numerics_fingerprint == dense.numerics_fingerprint
        assert torch.allclose(logits(engine), logits(dense), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("sums", ["whole", pytest.param("parts", marks=pytest.mark.slow)])
def test_ranks_have_the_same_activations(tmp_path: Path, sums: Literal["whole", "parts"]) -> None:
    file = save_random_gguf(tmp_path, lambda name: "Q4_1")
    with sharded(file, 2, tensor_parallel_sums=sums) as engine:
        assert engine.leader is not None
        found = [engine.info().activations, *(report.activations for report in engine.leader.reports)]
        assert found == ["int8", "int8"]
        assert engine.bitwise
        assert rows_that_differ(engine) == 0


@pytest.mark.slow
def test_rank_0_says_why_int8_activations_are_refused(tmp_path: Path) -> None:
    """No other rank exits first, which would hide the reason."""
    folder = save_model(tmp_path, small_config("llama"))
    reason = refusal(folder, device="cpu", tensor_parallel=2, activations="int8")
    assert reason.startswith("activations: int8 needs a trained draft, or a GGUF file")


def test_ranks_agree_on_activations(tmp_path: Path) -> None:
    """A rank whose shard has no quantized weights follows the others."""

    def resolve(fused: FusedModel, group: GroupInTurns) -> list[str]:
        kinds = {"Q4_1"} if group.rank == 1 else {"FLOAT32"}
        options: tuple[Activations, ...] = ("auto", "float32", "int8")
        return [resolve_activations(option, kinds, group) for option in options]

    folder = save_model(tmp_path, small_config("llama"))
    assert run_ranks(folder, 2, "whole", resolve) == [["int8", "float32", "int8"]] * 2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_have_the_weights_fingerprint_of_one_device(tmp_path: Path, dtype: str) -> None:
    file = save_random_gguf(tmp_path, lambda name: "Q4_1")
    options = EngineOptions(model=str(file), device="cpu", dtype=dtype, tensor_parallel=2)
    sharding = shard(load_config(options), 2, "whole")
    first, second = (load_model(options, Share(sharding, rank)) for rank in (0, 1))
    assert first.checksums
    assert second.checksums
    unsharded = weights_fingerprint(load_model(options.model_copy(update={"tensor_parallel": 1})))
    assert weights_fingerprint(first, {**first.checksums, **second.checksums}) == unsharded
