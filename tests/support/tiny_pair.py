"""The tiny pair that benchmarks use too, under the name by which tests import it."""

from benchmarks.pair import MAX_MODEL_LEN, make_tiny_pair, tiny_config

__all__ = ["MAX_MODEL_LEN", "make_tiny_pair", "tiny_config"]
