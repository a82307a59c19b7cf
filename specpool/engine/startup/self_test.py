"""Captures an engine's graphs, proves that its results are batch-invariant, and computes their fingerprint."""

import hashlib
import logging
import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.spans import Span
from specpool.engine.models.facts import ModelFacts
from specpool.engine.passes.families import window_of
from specpool.engine.passes.forward_pass import ForwardPass
from specpool.engine.passes.gpu.captured import CapturedModel
from specpool.engine.passes.native.model import NativeModel
from specpool.engine.probes.kernels import attention_agrees
from specpool.engine.probes.native_gemm import gemms_agree
from specpool.engine.probes.operations import OperationProbe
from specpool.engine.run.engine import Engine
from specpool.engine.startup.recurrence import recurrence_agrees

log = logging.getLogger(__name__)


def capture_graphs(engine: Engine, report: Callable[[str], None] = log.info, drafts: bool = True) -> None:
    """Capture the passes of an engine, unless its pass captures none.

    `report`: called before. `drafts`: capture the steps of drafts, too.
    """
    if not engine.forward_pass.captured_rows:
        return
    report("capturing CUDA graphs")
    began = time.perf_counter()
    count = engine.capture_graphs(drafts)
    log.info("captured %d CUDA graphs in %.1f s", count, time.perf_counter() - began)


TOKENS = 72
"""More than the largest tile of attended positions."""
FIRST_PASS, ROWS = 40, 4
STRIDE = 7919


def numerics_fingerprint(engine: Engine) -> str:
    """`logits_digest` of an engine that passed the self-test; otherwise "".

    It depends on weights, dtype, kernels, device and library versions. It depends on the number of threads only if the
    pass consists of torch operations.
    """
    return logits_digest(engine) if engine.bitwise else ""


@torch.inference_mode()
def logits_digest(engine: Engine) -> str:
    """SHA-256 over logits at the start and at the end of a fixed sequence. Overwrites the first slot."""
    length = min(TOKENS, engine.max_model_len)
    first = min(FIRST_PASS, length // 2)
    tokens = [i * STRIDE % engine.vocab_size for i in range(length)]
    passes = (Span(0, 0, tokens[:first], ROWS), Span(0, first, tokens[first:], ROWS))
    digest = hashlib.sha256()
    for span in passes:
        digest.update(engine.forward([span]).contiguous().view(torch.uint8).cpu().numpy().tobytes())
    return digest.hexdigest()


# Tokens of a prompt in one pass.
SHORT_PASS, LONG_PASSES = 15, (97, 271)
# Tokens of the passes whose operations are probed, besides the maximum of one pass.
PROBED_PASSES = (1, 2, 7, SHORT_PASS, *LONG_PASSES)
# Tokens of prompts that take several splits of attention.
LONG_PROMPTS = (300, 1100)
# Passes of a captured shape, each with other numbers.
REPLAYS = 3


def self_test(engine: Engine) -> bool:
    """Whether a token's logits have the same bits in every batch.

    Probes every kind of operation with inputs that reveal a difference, then compares whole passes of random tokens.
    All slots of the engine must be free.
    """
    agree = _operations_agree(engine) and _rounds_agree(engine) and _long_passes_agree(engine) and _states_agree(engine)
    agree = agree and recurrence_agrees(engine, _random_tokens(engine, engine.max_model_len, seed=4))
    (log.debug if agree else log.warning)("self-test: equivalence is %s", "bitwise" if agree else "numeric")
    return agree


def _operations_agree(engine: Engine) -> bool:
    """Whether each operation gives equal rows equal bits, in passes from one row to the maximum."""
    forward_pass = engine.forward_pass
    if isinstance(forward_pass, NativeModel):
        reports = [] if engine.leader is None else engine.leader.reports
        return gemms_agree(forward_pass) and all(report.agrees for report in reports)
    if not attention_suits(forward_pass, engine.layout.arena, engine.facts):
        log.warning("self-test: attention is not batch invariant")
        return False
    tokens = _random_tokens(engine, min(engine.max_model_len, engine.max_num_batched_tokens), seed=2)
    others = engine.leader.probing() if engine.leader is not None else nullcontext(dict[str, None]())
    with others as unequal_elsewhere, probing(forward_pass, engine.layout.arena) as probe:
        for size in dict.fromkeys(min(size, len(tokens)) for size in (*PROBED_PASSES, len(tokens))):
            engine.forward([Span(0, 0, tokens[:size], size)])
    log.debug("self-test: operations tested only by whole passes: %s", ", ".join(probe.skipped))
    unequal = {**probe.unequal, **unequal_elsewhere}
    if unequal:
        log.warning("self-test: equal rows do not have equal bits after %s", ", ".join(unequal))
    return not unequal


def attention_suits(forward_pass: ForwardPass, arena: KVArena, facts: ModelFacts) -> bool:
    """Whether attention kernels are batch invariant. Probing operations covers every other attention.

    `facts`: of the model, or of a rank's shard.
    """
    return not _runs_kernels(forward_pass) or all(
        attention_agrees(arena, facts.query_groups, facts.max_model_len, kind) for kind in forward_pass.attention_kinds
    )


@contextmanager
def probing(forward_pass: ForwardPass, arena: KVArena) -> Iterator[OperationProbe]:
    """Probe the operations of this rank's passes within the context."""
    constants = [*forward_pass.parameters(), *forward_pass.buffers(), *arena.keys]
    with forward_pass.eager(), OperationProbe(constants) as probe:
        yield probe


def _rounds_agree(engine: Engine) -> bool:
    """Whether sequences decoded alone, token by token, have the same logits in a ragged batch with drafts."""
    rng, steps = random.Random(0), 5
    lengths = _prompt_lengths(engine, engine.max_model_len - 8)
    truth = [[rng.randrange(engine.vocab_size) for _ in range(n + steps)] for n in lengths]

    alone = []
    with _eager(engine):
        for length, tokens in zip(lengths, truth, strict=True):
            spans = [Span(0, 0, tokens[:length], 1)]
            spans += [Span(0, p, tokens[p : p + 1], 1) for p in range(length, length + steps)]
            alone.append(torch.cat([engine.forward([span]) for span in spans]))

    # As many sequences as fit, in random order, reusing pages of finished sequences.
    keys = [("self-test", i) for i in range(len(lengths))]
    taken = {i: engine.slots.take(keys[i], len(truth[i])) for i in rng.sample(range(len(keys)), len(keys))}
    members = [(slot.index, lengths[i], truth[i], alone[i]) for i, slot in taken.items() if slot is not None]
    # One pass for the prompts without their last tokens, then rounds with drafts, and without.
    engine.forward([Span(slot, 0, tokens[: n - 1], 0) for slot, n, tokens, _ in members])
    drafts, agree = [rng.randint(1, steps) for _ in members], True
    for drafted in (drafts, [0] * len(members)):
        for _ in range(REPLAYS if isinstance(engine.forward_pass, CapturedModel) else 1):
            spans = [
                Span(slot, n - 1, tokens[n - 1 : n + d], d + 1)
                for (slot, n, tokens, _), d in zip(members, drafted, strict=True)
            ]
            together = engine.forward(spans).split([span.num_logits for span in spans])
            pairs = zip(together, members, strict=True)
            agree = agree and all(torch.equal(rows, single[: len(rows)]) for rows, (*_, single) in pairs)
            rng.shuffle(members)  # other numbers in the same shape
    engine.slots.release(keys)
    return agree


def _prompt_lengths(engine: Engine, max_length: int) -> list[int]:
    """Lengths of prompts around a tile of the cache. Those of kernels also take several splits of attention."""
    lengths = [3, 17, max(2, engine.tiles.kv - 2), engine.tiles.kv + 40]
    window = window_of(engine.loaded.config)
    if window is not None and window <= max(LONG_PROMPTS, default=0):
        lengths.append(window + SHORT_PASS)
    if _runs_kernels(engine.forward_pass):
        lengths += sorted({min(length, max_length) for length in LONG_PROMPTS})
    return [n for n in lengths if n <= max_length]


def _runs_kernels(forward_pass: ForwardPass) -> bool:
    return not forward_pass.plans_attention and not isinstance(forward_pass, NativeModel)


def _long_passes_agree(engine: Engine) -> bool:
    """Whether a prompt in chunks of any size leaves the same cache and logits. Torch splits the work of long passes."""
    length = min(LONG_PASSES[-1], engine.max_model_len)
    tokens = _random_tokens(engine, length, seed=1)
    arena = engine.layout.arena
    short = [engine.forward([Span(0, at, tokens[at : at + SHORT_PASS], 1)]) for at in range(0, length, SHORT_PASS)]
    cached = arena.columns_of(0, 0, length - 1)  # for the last token, compare only the logits
    expected = [layer[:, cached].clone() for layer in (arena.keys[-1], arena.values[-1])]
    for size in (size for size in LONG_PASSES if size <= length):
        logits = [engine.forward([Span(0, at, tokens[at : at + size], 1)]) for at in range(0, length, size)]
        actual = [layer[:, cached] for layer in (arena.keys[-1], arena.values[-1])]
        if not torch.equal(logits[-1], short[-1]) or not all(map(torch.equal, actual, expected)):
            return False
    return True


def _states_agree(engine: Engine) -> bool:
    """Whether replayed passes record the same hidden states as eager ones, for two choices of layers."""
    if not isinstance(engine.forward_pass, CapturedModel):
        return True
    last = engine.facts.layers
    tokens = _random_tokens(engine, min(SHORT_PASS, engine.max_model_len), seed=3)
    span = Span(0, 0, tokens, 1, num_states=len(tokens))
    with _eager(engine):  # with more than `MAX_STATE_LAYERS` layers, ranks run eagerly, too
        states = engine.forward_with_states([span], tuple(range(1, last + 1)))[1]
    expected = states.view(len(tokens), last, -1)
    for layers in ((last,), tuple(sorted({1, (last + 1) // 2, last}))):
        replayed = engine.forward_with_states([span], layers)[1].view(len(tokens), len(layers), -1)
        if not torch.equal(replayed, expected[:, [layer - 1 for layer in layers]]):
            log.warning("self-test: replayed passes record wrong hidden states after layers %s", layers)
            return False
    return True


def _eager(engine: Engine) -> AbstractContextManager[None]:
    """A context in which passes run eagerly, except on several ranks: all must capture a collective, or none."""
    return engine.forward_pass.eager() if engine.leader is None else nullcontext()


def _random_tokens(engine: Engine, count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(engine.vocab_size) for _ in range(count)]
