"""The part of the self-test that covers recurrent layers: states do not depend on the rounds that computed them."""

import torch

from specpool.engine.cache.spans import Span
from specpool.engine.run.engine import Engine
from specpool.protocol.rounds import ItemStatus, SequenceItem

LENGTH, PIECES = 110, (15, 97)
"""Tokens of the sequence, and of the pieces of its prompt, which end within pages and tails."""
DRAFTS, ACCEPTED = 5, 2
DECODED = 2 * (DRAFTS + 1)
"""Last tokens of the sequence, which are also decoded one by one."""


def recurrence_agrees(engine: Engine, tokens: list[int]) -> bool:
    """Whether rows and states keep their bits after rejected drafts, repeated rounds and a cached prefix.

    `tokens`: random tokens, up to the maximum length of a sequence. True for models without recurrent layers.
    """
    if engine.facts.recurrent is None:
        return True
    tokens = tokens[:LENGTH]
    with engine.forward_pass.eager():
        rows, states = _decode(engine, tokens)
    others = [_states_in_pieces(engine, tokens, size) for size in PIECES]
    if not all(torch.equal(*pair) for other in others for pair in zip(states, other, strict=True)):
        return False
    return _rounds_agree(engine, tokens, rows) and _prefix_agrees(engine, tokens, rows)


def _decode(engine: Engine, tokens: list[int]) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The rows of logits of the last tokens, decoded alone one by one, and the states after them."""
    begin = max(1, len(tokens) - DECODED)
    engine.forward([Span(0, 0, tokens[:begin], 0)])
    rows = [engine.forward([Span(0, at, tokens[at : at + 1], 1)]) for at in range(begin, len(tokens))]
    return torch.cat(rows), _states(engine, len(tokens))


def _states_in_pieces(engine: Engine, tokens: list[int], size: int) -> list[torch.Tensor]:
    """The states after all tokens, of which all but the last one run in pieces of at most `size`."""
    last = len(tokens) - 1
    for at in range(0, last, size):
        engine.forward([Span(0, at, tokens[at : min(at + size, last)], 0)])
    engine.forward([Span(0, last, tokens[last:], 1)])
    return _states(engine, len(tokens))


def _states(engine: Engine, position: int) -> list[torch.Tensor]:
    """Copies of the states of slot 0 after this many positions, and of the inputs of the convolution before."""
    arena, checkpoints = engine.layout.arena.recurrent, engine.slots.checkpoints
    assert arena is not None
    assert checkpoints is not None
    entry = checkpoints.entry(0, position)
    return [arena.states[:, entry].clone(), arena.edges[:, entry].clone()]


def _rounds_agree(engine: Engine, tokens: list[int], rows: torch.Tensor) -> bool:
    """Whether rejecting draft tokens and repeating a round leave no trace. `rows`: those of the last tokens."""
    begin = len(tokens) - len(rows)
    right = tokens[begin : begin + DRAFTS + 1]
    wrong = [right[0], *((token + 1) % engine.vocab_size for token in right[1:])]
    after = tokens[begin + ACCEPTED + 1 :][: DRAFTS + 1]
    engine.forward([Span(0, 0, tokens[:begin], 0)])
    for first, token_ids, num_valid in ((0, wrong, 1), (0, right, len(right)), (ACCEPTED + 1, after, len(after))):
        span = Span(0, begin + first, token_ids, len(token_ids), num_tentative=len(token_ids) - 1)
        if token_ids and not torch.equal(engine.forward([span])[:num_valid], rows[first : first + num_valid]):
            return False
    return True


def _prefix_agrees(engine: Engine, tokens: list[int], rows: torch.Tensor) -> bool:
    """Whether a sequence continues exactly after a prefix that an earlier sequence left in the cache."""
    engine.forget_all()  # the passes above have left pages in free slots
    for sequence in range(2):
        key, item = ("self-test", sequence), SequenceItem(0, 0, tuple(tokens), cache_namespace=b"self-test")
        if engine.slots.realign(key, 1, item, len(tokens)) is not ItemStatus.OK:
            return False
        slot, count = engine.slots[key], min(len(item.token_ids), len(rows))
        slot.token_ids[item.base_length :] = item.token_ids
        logits = engine.forward([Span(slot.index, item.base_length, item.token_ids, count)])
        engine.slots.keep(key, len(tokens))
        engine.slots.release([key])
        if not torch.equal(logits, rows[-count:]):
            return False
    return True
