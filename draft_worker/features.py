"""Reads the target's hidden states from an item."""

import logging
from functools import cache

import torch
from torch.nn.functional import pad

from specpool.engine.models.draft_parts import Features
from specpool.protocol.rounds import ProposeItem

log = logging.getLogger(__name__)


def states_of(item: ProposeItem, features: Features | None, following: int = 0) -> torch.Tensor | None:
    """Return the states before an item's last committed tokens, [n, width], with zeros for the tokens that follow.

    `following`: number of unverified or forced tokens after the committed ones. None if the item has no states, or not
    finite rows of them: a draft without states works, only worse, so malformed ones are ignored.
    """
    if features is None or not item.features:
        return None
    count, rest = divmod(len(item.features), features.width * torch.bfloat16.itemsize)
    if not rest and count <= len(item.token_ids) - item.num_unverified:
        numbers = torch.frombuffer(bytearray(item.features), dtype=torch.bfloat16).float()
        if numbers.isfinite().all():  # others would spoil the sequence's cache
            return pad(numbers.view(count, features.width), (0, 0, 0, following))
    _warn(features.width)
    return None


@cache
def _warn(width: int) -> None:
    log.warning("ignoring features that are not rows of %d finite bfloat16 numbers for the last tokens", width)
