"""Hidden states of the target: selects them for the rounds that request them, and packs them for the wire."""

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch

from specpool.engine.cache.slots import SequenceKey
from specpool.engine.cache.spans import Span
from specpool.engine.run.sequences import Choices
from specpool.protocol.rounds import ItemStatus, Verdict, VerifyItem, VerifyRound


def rounds_with_features(rounds: Sequence[VerifyRound]) -> dict[SequenceKey, VerifyRound]:
    """Return the round of each sequence whose features are requested."""
    asking = (round_ for round_ in rounds if round_.feature_layers)
    return {
        (round_.coordinator_id, item.sequence_id): round_
        for round_ in asking
        for item in round_.items
        if item.want_features
    }


def select_layers(states: torch.Tensor, layers: tuple[int, ...], wanted: tuple[int, ...]) -> torch.Tensor:
    """Return the states [n, width] after the layers `wanted`. `states`: after all `layers`."""
    if wanted == layers:
        return states
    by_layer = states.view(len(states), len(layers), states.shape[1] // len(layers))
    return by_layer[:, [layers.index(layer) for layer in wanted]].flatten(1)


def pack_features(states: Sequence[torch.Tensor]) -> list[bytes]:
    """Return the states of each sequence in wire format. On a GPU, a single copy moves all of them to the host."""
    packed = torch.cat([each.flatten() for each in states]).cpu().view(torch.int16).numpy()
    ends = accumulate(each.numel() for each in states)
    return [packed[end - each.numel() : end].tobytes() for each, end in zip(states, ends, strict=True)]


def add_features(
    asking: Mapping[SequenceKey, VerifyRound],
    spans: Mapping[SequenceKey, Span],
    ready: Mapping[SequenceKey, VerifyItem],
    verdicts: Mapping[SequenceKey, Verdict],
    choices: Mapping[SequenceKey, Choices],
    layers: tuple[int, ...],
) -> None:
    """Add the states of the kept positions to verdicts. `layers`: the layers of the choices' states."""
    wanted = {}
    for key in asking.keys() & verdicts.keys():
        states, item, verdict, window = choices[key].states, ready[key], verdicts[key], asking[key].feature_window
        if states is not None and verdict.status is ItemStatus.OK:
            first = len(states) - item.num_features(window, len(spans[key].token_ids) - len(item.token_ids))
            end = first + item.num_features(window, max(0, len(verdict.token_ids) - 1))
            wanted[key] = select_layers(states[first:end], layers, asking[key].feature_layers)
    if wanted:
        for key, features in zip(wanted, pack_features([*wanted.values()]), strict=True):
            verdicts[key].features = features
