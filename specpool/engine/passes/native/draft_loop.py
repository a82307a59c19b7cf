"""The draft loop of CPUs: one call of compiled code samples and runs the passes of all steps (draft_loop.c)."""

from array import array
from collections.abc import Callable, Sequence
from ctypes import (
    CDLL,
    CFUNCTYPE,
    POINTER,
    Structure,
    addressof,
    byref,
    c_char,
    c_double,
    c_int64,
    c_uint64,
    c_void_p,
    cast,
)
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import numpy as np
import torch

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.checkpoints import Segment
from specpool.engine.native.compiler import compile_library
from specpool.engine.passes.drafts import Draft, DraftRound, drafts_of
from specpool.engine.passes.native.decoder import Batch, Model
from specpool.engine.passes.packing import NUMBERS_PER_ROW, PackedBatch
from specpool.engine.sampling import compiled
from specpool.engine.sampling.batch import compiled_is_exact
from specpool.engine.sampling.compiled import NOTHING_REJECTED, NativeSampler, Row, compile_sampler, point_to_changes
from specpool.engine.sampling.head import Head
from specpool.engine.sampling.lexers import ALL, Reader, Words, full_mask
from specpool.engine.sampling.reasoning import LimitedReader
from specpool.engine.sampling.rules import Changes

SOURCES = (*(Path(__file__).with_name(name) for name in ("draft_loop.c", "segment.h")), compiled.ROWS)
SegmentNumbers = c_int64 * len(Segment._fields)
ROW_ARRAYS = ("token_ids", "positions", "slots", "prefix_lengths", "offsets")
MASK64 = (1 << 64) - 1

Prepare = Callable[[PackedBatch], tuple[Batch, torch.Tensor]]
"""Return the arguments of a pass, and its logits [rows, padded rows of the head]."""


class DraftState(Structure):
    """A draft of the loop."""

    _fields_ = (
        ("row", Row),
        *((name, c_int64) for name in ("position", "slot", "prefix_length", "offset")),
        ("seed", c_uint64),
        *((name, c_int64) for name in ("prompt_length", "unmasked_from")),
        *((name, c_void_p) for name in ("counted_ids", "counts")),
        *((name, c_double) for name in ("min_chance", "next_chance", "chance")),
        *((name, c_int64) for name in ("round", "num_draft_tokens", "count", "is_broken")),
        ("segment", SegmentNumbers),
    )


class RoundState(Structure):
    """A round of the loop."""

    _fields_ = (("chances", c_void_p), ("num_chances", c_int64), ("step_cost", c_double), ("gain", c_double))


class Loop(Structure):
    """Arguments and results of the loop."""

    _fields_ = (
        *((name, c_void_p) for name in ("forward", "model", "batch")),
        *((name, c_void_p) for name in (*ROW_ARRAYS, "segments")),
        *((name, c_void_p) for name in ("logits", "first_logits")),
        *((name, c_int64) for name in ("stride", "first_stride")),
        *((name, c_void_p) for name in ("input_states", "own_states", "states")),
        ("hidden", c_int64),
        ("sample", c_void_p),
        ("sampling", compiled.Batch),
        ("drafts", POINTER(DraftState)),
        ("rounds", POINTER(RoundState)),
        *((name, c_int64) for name in ("num_drafts", "num_rounds", "max_draft_tokens")),
        *((name, c_void_p) for name in ("draft_token_ids", "confidences", "read_token")),
        *((name, c_int64) for name in ("num_passes", "num_tokens")),
    )


class NativeDraftLoop:
    """The draft loop of a compiled pass."""

    min_draft_tokens = 2

    def __init__(
        self, library: CDLL, decoder: CDLL, model: Model, prepare: Prepare, arena: KVArena, sampler: NativeSampler
    ) -> None:
        """`decoder`, `model` and `prepare`: of the pass. Its threads also sample."""
        self._run, self._prepare, self._arena, self._sampler = library.run_loop, prepare, arena, sampler
        self._pool = addressof(c_char.in_dll(decoder, "own_pool"))
        self._code = {
            "forward": cast(decoder.forward_step, c_void_p),
            "model": addressof(model),
            "sample": cast(sampler.library.sample_batch, c_void_p),
        }
        self._model = model  # keeps it alive
        self._in_progress: Loop | None = None

    def can_draft(self, draft: Draft) -> bool:
        """Return True: the loop supports all rules."""
        return True

    @property
    def passes_in_progress(self) -> int:
        """Passes that the call in progress has finished."""
        loop = self._in_progress
        return 0 if loop is None else loop.num_passes

    def __call__(
        self,
        logits: torch.Tensor,
        rounds: Sequence[DraftRound],
        own_states: torch.Tensor | None = None,
    ) -> tuple[int, int]:
        """Extend the drafts; see `DraftLoop`."""
        drafts = drafts_of(rounds)
        count, size = len(drafts), max(draft.num_draft_tokens for draft in drafts)
        states, numbers = (DraftState * count)(), (number for number, own in enumerate(rounds) for _ in own.drafts)
        changes = [self._begin(*of_draft) for of_draft in zip(states, drafts, numbers, strict=True)]
        chances = [np.array(round_.chances, np.float64) for round_ in rounds]
        ends = [
            RoundState(own.ctypes.data, len(own), each.step_cost) for own, each in zip(chances, rounds, strict=True)
        ]
        token_ids, confidences = np.empty((count, size), np.int32), np.empty((count, size), np.float64)
        rejected, batch, reader = np.array([NOTHING_REJECTED], np.int32), self._batch(drafts), _reader(drafts, changes)
        arguments, pass_logits = self._prepare(batch)
        all_states = torch.empty(count, size, 0 if own_states is None else own_states.shape[1])
        if own_states is not None:
            all_states[:, 0] = own_states
        loop = Loop(
            **self._code,
            batch=addressof(arguments),
            **{name: getattr(arguments, name) for name in (*ROW_ARRAYS, "segments")},
            logits=pass_logits.data_ptr(),
            first_logits=logits.data_ptr(),
            stride=pass_logits.stride(0),
            first_stride=logits.stride(0),
            input_states=arguments.input_states,
            own_states=arguments.own_states,
            states=all_states.data_ptr(),
            hidden=all_states.shape[2],
            sampling=self._sampler.batch((Row * count)(), rejected, self._pool),
            drafts=states,
            rounds=(RoundState * len(rounds))(*ends),
            num_drafts=count,
            num_rounds=len(rounds),
            max_draft_tokens=size,
            draft_token_ids=token_ids.ctypes.data,
            confidences=confidences.ctypes.data,
            read_token=cast(reader, c_void_p),
        )
        self._in_progress = loop
        self._run(byref(loop))
        self._in_progress = None
        del batch, changes, chances, reader  # the loop used their memory
        kept = repeat(None) if own_states is None else all_states
        for of_draft in zip(states, drafts, token_ids.tolist(), confidences.tolist(), kept, strict=False):
            _end(*of_draft)
        return loop.num_passes, loop.num_tokens

    def _begin(self, state: Any, draft: Draft, number: int) -> Changes | None:
        """Fill in the state of a draft of round `number`. Return the changes that the state points to."""
        span, rules = draft.span, draft.rules
        has_confidences = rules is None and draft.needs_confidences
        state.row = self._sampler.template(
            None if rules is None else rules.params, num_top=0 if has_confidences else -1
        )
        state.position, state.slot, state.round = span.end, span.slot, number
        state.prefix_length, state.offset = span.prefix_length, span.offset
        state.num_draft_tokens = draft.num_draft_tokens
        if draft.segment is not None:
            state.segment = SegmentNumbers(*draft.segment)
        state.min_chance, state.next_chance, state.chance = draft.min_chance, draft.next_chance, draft.chance
        if rules is None:
            return None
        params = rules.params
        state.seed, state.prompt_length = params.seed & MASK64, params.prompt_length
        state.unmasked_from = params.prompt_length + params.min_tokens
        (changes,) = draft.rows.changes()
        if rules.block is not None or (changes is not None and changes.allowed is not None):
            changes = changes or Changes()
            allowed = full_mask(self._sampler.vocab_size) if changes.allowed is None else changes.allowed.copy()
            changes = replace(changes, allowed=allowed)  # the loop overwrites it, and the mask may be reused
        if changes is None or not params.has_penalties:
            point_to_changes(state.row, changes)
            return changes
        room, count = np.zeros(draft.num_draft_tokens, np.int32), len(changes.counted_ids)
        changes = replace(
            changes,
            counted_ids=np.concatenate([changes.counted_ids, room]),
            counts=np.concatenate([changes.counts, room]),
        )
        point_to_changes(state.row, changes)
        state.row.num_counted, state.counted_ids, state.counts = count, state.row.counted_ids, state.row.counts
        return changes

    def _batch(self, drafts: Sequence[Draft]) -> PackedBatch:
        """A pass with a row for each draft. The loop fills in its numbers."""
        count, max_length = len(drafts), max(draft.span.end + draft.num_draft_tokens for draft in drafts)
        hidden = self._model.hidden if self._model.fc.panels else 0
        segments = 0 if self._arena.recurrent is None else count
        numbers = array("q", [0] * NUMBERS_PER_ROW * count) + array("q", range(count))
        numbers += array("q", [0] * len(Segment._fields) * segments)
        return PackedBatch(
            arena=self._arena,
            tokens=count,
            rows=count,
            tiles=0,
            max_length=max_length,
            num_logits=count,
            numbers=torch.frombuffer(numbers, dtype=torch.int64),
            input_states=torch.empty(count, hidden) if hidden else None,
            own_states=torch.empty(count, hidden) if hidden else None,
            num_segments=segments,
        )


READ_TOKEN = CFUNCTYPE(None, c_int64, c_int64)


def _reader(drafts: Sequence[Draft], changes: Sequence[Changes | None]) -> Any:
    """The function that updates a draft's mask after each token. Each draft reads a fork of its sequence's grammar."""
    readers: dict[int, tuple[Reader | LimitedReader | None, Words]] = {}
    for number, (draft, change) in enumerate(zip(drafts, changes, strict=True)):
        if change is not None and change.allowed is not None:
            assert draft.rules is not None
            readers[number] = draft.rules.fork(draft.context, draft.prefix_length), change.allowed

    def read_token(number: int, token_id: int) -> None:
        reader, allowed = readers[number]
        if reader is None:
            allowed.fill(ALL)
        else:
            reader.read_token(token_id, allowed)

    return READ_TOKEN(read_token)


def _end(
    state: Any, draft: Draft, token_ids: list[int], confidences: list[float], own_states: torch.Tensor | None
) -> None:
    """Copy the results of the loop to a draft."""
    draft.token_ids, draft.chance, draft.is_broken = token_ids[: state.count], state.chance, bool(state.is_broken)
    if state.row.num_top >= 0:
        draft.confidences = confidences[: state.count]
    num_run = state.position - draft.span.end
    if own_states is not None:
        draft.own_states = [own_states[: num_run + 1]]
    if num_run:
        draft.feed(draft.token_ids[:num_run])


def compile_draft_loop(
    decoder: CDLL, model: Model, prepare: Prepare, arena: KVArena, head: Head
) -> NativeDraftLoop | None:
    """The draft loop of a compiled pass; None if this machine cannot compile the loop or the sampler."""
    library = compile_library("the draft loop", SOURCES, flags=compiled.FLAGS)
    sampling = compile_sampler() if compiled_is_exact() else None
    if library is None or sampling is None:
        return None
    return NativeDraftLoop(library, decoder, model, prepare, arena, NativeSampler(sampling, head))
