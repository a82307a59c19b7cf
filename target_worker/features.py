"""Packs hidden states of the target for the rounds that request them."""

from collections.abc import Sequence

from specpool.engine.cache.slots import SequenceKey
from specpool.engine.run.sequences import States
from specpool.protocol.rounds import VerifyRound


def layers_of(rounds: Sequence[VerifyRound]) -> tuple[int, ...]:
    """Return all layers whose states any round needs, in ascending order."""
    return tuple(sorted({layer for round_ in rounds for layer in round_.feature_layers}))


def rounds_with_features(rounds: Sequence[VerifyRound]) -> dict[SequenceKey, VerifyRound]:
    """Return the round of each sequence whose features are requested."""
    asking = (round_ for round_ in rounds if round_.feature_layers)
    return {
        (round_.coordinator_id, item.sequence_id): round_
        for round_ in asking
        for item in round_.items
        if item.want_features
    }


def pack_features(states: States, layers: tuple[int, ...], wanted: tuple[int, ...]) -> bytes:
    """Return the states after the layers `wanted`, as on the wire. `states`: after all `layers`."""
    if wanted != layers:
        rows = states.reshape(len(states), len(layers), -1)
        states = rows[:, [layers.index(layer) for layer in wanted]]
    return states.tobytes()
