"""The checksums of all ranks together give the fingerprint of one device, for any dtype."""

from pathlib import Path

import pytest
from gguf_files import save_random_gguf

from specpool.engine.config.options import EngineOptions
from specpool.engine.models.config import load_config
from specpool.engine.models.loading import load_model
from specpool.engine.models.weights_fingerprint import weights_fingerprint
from specpool.engine.sharding.shares import Share, shard


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ranks_have_the_fingerprint_of_one_device(tmp_path: Path, dtype: str) -> None:
    file = save_random_gguf(tmp_path, lambda name: "Q4_1")
    options = EngineOptions(model=str(file), device="cpu", dtype=dtype)
    sharding = shard(load_config(options), 2, "whole")
    sharded = options.model_copy(update={"tensor_parallel": 2})
    first, second = (load_model(sharded, Share(sharding, rank)) for rank in (0, 1))
    assert first.checksums
    assert second.checksums
    assert weights_fingerprint(first, {**first.checksums, **second.checksums}) == weights_fingerprint(
        load_model(options)
    )
