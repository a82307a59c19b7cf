"""The interface of all forward passes, for the engine and its probes."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import nn

from specpool.engine.cache.arena import KVArena
from specpool.engine.cache.memory import weights_of
from specpool.engine.passes.drafts import Draft, DraftRound
from specpool.engine.passes.kinds import FULL_ATTENTION, AttentionKind
from specpool.engine.passes.packing import PackedBatch, Shape
from specpool.engine.sampling.head import Head


class DraftLoop(Protocol):
    """Runs all steps of drafts on the device. Each step chooses the tokens that the next one runs."""

    def can_draft(self, draft: Draft) -> bool:
        """Whether the loop can choose the tokens of a draft. It may draft past the limits on reasoning."""

    @property
    def min_draft_tokens(self) -> int:
        """Minimum length of the longest draft at which the loop is faster than single steps."""

    @property
    def passes_in_progress(self) -> int:
        """Passes that the call in progress has finished, if it is long enough to count them."""

    def __call__(
        self,
        logits: torch.Tensor,
        rounds: Sequence[DraftRound],
        own_states: torch.Tensor | None = None,
    ) -> tuple[int, int]:
        """Extend the drafts of all rounds until each round has enough.

        Every draft requests draft tokens, and its slot has pages for them. `logits`: logits after each span, [n, rows
        of the head]. `own_states`: states of each span's last row, [n, hidden], if the pass reads states. Return the
        numbers of passes and tokens run.
        """


class ForwardPass(nn.Module, ABC):
    """Computes the logits of packed batches, and holds all weights it needs."""

    compute_dtype: torch.dtype
    """Dtype of activations and of the KV cache."""
    plans_attention: bool = True
    """Whether batches need an attention plan. Without one, the pass locates cached positions itself."""
    exact_by_construction: bool = False
    """Whether the pass is batch-invariant without padding, so no tiles need to be chosen."""
    rows_per_tile: int = 1
    """Maximum rows of a sequence that share a tile of attention, in a pass without an attention plan."""
    attention_kinds: Sequence[AttentionKind] = (FULL_ATTENTION,)
    """The kinds of attention of all layers, in a pass without an attention plan."""
    state_size: int = 0
    """Size of the states that a feature draft reads beside the tokens, after projection; 0: it reads none."""
    captured_rows: int = 0
    """Maximum rows of captured passes, which have memory of their own; 0: the pass captures none."""

    def __init__(self) -> None:
        super().__init__()
        self.notes: list[str] = []
        """What an operator should know about this pass, such as a fallback."""

    @abstractmethod
    def forward(self, batch: PackedBatch) -> torch.Tensor:
        """Logits [R, rows of the head] of the requested rows, possibly followed by padding."""

    def project(self, states: torch.Tensor) -> torch.Tensor:
        """Project states of the target [n, width] to those that the pass reads [n, state_size]."""
        return states

    def padded_shape(self, needed: Shape) -> Shape:
        """The shape in which to run a pass that needs at least these sizes.

        Only a pass without an attention plan may pad: its padding is neither cached nor attended.
        """
        return needed

    def capture_graphs(self, arena: KVArena, sizes: Sequence[int], max_length: int, max_drafts: int) -> int:
        """Capture passes on this cache, before serving. Return the number of graphs. Failures become `notes`.

        `sizes`: padded numbers of rows. `max_length`: positions of a sequence. `max_drafts`: sequences of a
        draft; 0: capture no steps of drafts.
        """
        return 0

    def scratch_bytes(self, rows: int, length: int) -> int:
        """Scratch bytes, beyond activations, of a pass of `rows` rows over sequences of `length` positions."""
        return 0

    def eager(self) -> AbstractContextManager[None]:
        """A context in which passes run operation by operation, so probes see every one."""
        return nullcontext()

    def draft_loop(self, arena: KVArena, head: Head) -> DraftLoop | None:
        """The draft loop that runs on the device with this cache; None if the pass has none."""
        return None

    @property
    def has_states(self) -> bool:
        """Whether passes can record hidden states; see `PackedBatch.record_states`."""
        return True

    @property
    def supports_branches(self) -> bool:
        """Whether spans may be branches of their sequences. Attention plans have no branches."""
        return not self.plans_attention

    @property
    def activations(self) -> str:
        """Format of the activations in GEMMs: a dtype, or "int8" for GEMMs with quantized weights."""
        return str(self.compute_dtype).removeprefix("torch.")

    @property
    def weight_kinds(self) -> Mapping[str, int]:
        """Bytes of the weights by dtype or quantized kind."""
        kinds = Counter[str]()
        for weight in weights_of(self):
            kinds[str(weight.dtype).removeprefix("torch.")] += weight.numel() * weight.element_size()
        return kinds
