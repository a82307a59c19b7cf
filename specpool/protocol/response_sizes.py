"""Maximum sizes of worker responses, in bytes. Larger responses are rejected before parsing."""

from collections.abc import Iterable, Sequence

from specpool.protocol.features import WantedFeatures
from specpool.protocol.rounds import ProposeItem, VerifyItem

MAX_SMALL_BYTES = 2**16
"""Limit of all responses except tokenizers and rounds. Responses of rounds may always be this large."""
# Upper bounds on encoded sizes: a result with its error but without tokens, a token, and a log-probability.
ITEM_BYTES, TOKEN_BYTES, LOGPROB_BYTES = 8192, 16, 16


def max_verify_bytes(items: Iterable[VerifyItem], features: WantedFeatures | None) -> int:
    """Return the maximum size of the response to a target round. `features`: for the items that want them."""
    return MAX_SMALL_BYTES + sum(_verify_result_bytes(item, features) for item in items)


def _verify_result_bytes(item: VerifyItem, features: WantedFeatures | None) -> int:
    num_draft_tokens = item.max_num_draft_tokens
    per_token = TOKEN_BYTES + (0 if item.logprobs is None else LOGPROB_BYTES * (1 + item.logprobs))
    size = ITEM_BYTES + per_token * (1 + num_draft_tokens)
    if features is None or not item.want_features:
        return size
    rows = min(features.window, max(1, len(item.token_ids))) + num_draft_tokens
    return size + rows * features.spec.row_bytes


def max_propose_bytes(items: Sequence[ProposeItem]) -> int:
    """Return the maximum size of the response to a draft round."""
    tokens = sum(max(1, item.num_branches) * (2 + item.num_draft_tokens) for item in items)
    return MAX_SMALL_BYTES + ITEM_BYTES * len(items) + TOKEN_BYTES * tokens
