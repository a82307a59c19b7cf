"""Features: hidden states of the target model, for drafts that read them. Their numbers are bfloat16, little endian."""

from typing import NamedTuple

NUMBER_BYTES = 2
MAX_FEATURE_BYTES = 24 * 2**20
"""Maximum bytes of the features of a round, in either direction. The rest of a message has room for its tokens."""
MAX_FEATURE_LAYERS = 16
MAX_FEATURE_WINDOW = 1024
MAX_FEATURE_WIDTH = 2**20


class FeatureSpec(NamedTuple):
    """The features that a draft reads."""

    layers: tuple[int, ...]
    """Numbers of layers of the target after which to take the residual stream."""
    width: int
    """Values per state, over all layers."""

    @property
    def row_bytes(self) -> int:
        return NUMBER_BYTES * self.width


class WantedFeatures(NamedTuple):
    """The features that a target round must return."""

    spec: FeatureSpec
    window: int
    """Maximum number of committed tokens of an item to return states for."""
