"""The tiny pair of the benchmarks, re-exported for tests."""

from benchmarks.pair import MAX_MODEL_LEN, make_tiny_pair, tiny_config

__all__ = ["MAX_MODEL_LEN", "make_tiny_pair", "tiny_config"]
