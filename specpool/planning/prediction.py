"""Predicts the speed of a pair by batch size and draft length, and finds the best configuration. Pure."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from specpool.distill.replay import acceptance_by_position, agreement_rate, mean_acceptance_length
from specpool.drafting.costs import RoundCosts, StepTimes
from specpool.planning.replaying import Recording
from specpool.protocol.worker_info import WorkerInfo

EXPECTED_POSITIONS = 2048
"""Default sequence length for sizing caches. Few sequences reach a model's maximum."""


@dataclass(frozen=True)
class Memory:
    """Measured memory of a worker; sizes in bytes."""

    weights: int
    activations: int
    kv_per_position: int
    positions: int
    """Positions of the whole KV cache."""
    multiple: int
    """The worker rounds a sequence's positions up to a multiple of this."""
    max_model_len: int
    """Maximum positions of a sequence."""
    state_per_slot: int = 0
    """Bytes of recurrent states per slot, with the prefix cache's share."""
    slots: int = 0
    """Slots of the measured worker."""

    @property
    def full_slot(self) -> int:
        """KV positions of a sequence of `max_model_len`."""
        return -(-self.max_model_len // self.multiple) * self.multiple

    def slot_positions(self, positions: int | None) -> int:
        """Return the KV positions of a sequence of this length (None: EXPECTED_POSITIONS), at most `full_slot`."""
        positions = EXPECTED_POSITIONS if positions is None else positions
        return min(self.full_slot, -(-positions // self.multiple) * self.multiple)

    def capacity(self, positions: int | None) -> int:
        """Return how many sequences of this length fit in the measured KV cache."""
        capacity = self.positions // self.slot_positions(positions)
        return min(capacity, self.slots) if self.state_per_slot else capacity

    def kv_bytes(self, slots: int, positions: int | None) -> int:
        """Return the bytes of KV cache and states for `slots` sequences, with room for at least one of full length."""
        kv_positions = max(self.full_slot, slots * self.slot_positions(positions))
        return kv_positions * self.kv_per_position + slots * self.state_per_slot

    def slot_bytes(self, positions: int | None) -> int:
        """Return the bytes of a sequence of this length, states included."""
        return self.slot_positions(positions) * self.kv_per_position + self.state_per_slot


@dataclass(frozen=True)
class Model:
    """A model and the cost of its passes."""

    name: str
    device: str
    dtype: str
    parameters: int
    memory: Memory
    tokenizer_fingerprint: str
    step_seconds: Mapping[int, float]
    """Seconds of a pass by its rows."""
    step_cached: int = 0
    """Cached positions of each sequence in the measured passes."""
    seconds_per_cached: float = 0.0
    """Extra seconds per new token and additional cached position."""
    max_rows: int = 0
    """Maximum rows of one pass; 0: unlimited."""
    revision: str | None = None
    """Commit of a model from the hub, if known."""
    activations: str = ""
    """Format of the activations in GEMMs, such as "int8", if known."""
    embedding_parameters: int = 0
    """Parameters of embeddings and output head, which are poor predictors of quality."""

    @classmethod
    def of(cls, info: WorkerInfo) -> "Model":
        """The model of a worker, with the costs that it has measured."""
        return cls(
            name=info.model,
            device=info.device,
            dtype=info.dtype,
            parameters=info.parameters,
            embedding_parameters=info.embedding_parameters,
            memory=Memory(
                weights=info.weight_bytes,
                activations=info.activation_bytes,
                kv_per_position=info.kv_bytes_per_token,
                positions=info.kv_positions_total or info.slots_total * info.max_model_len,
                multiple=max(1, info.kv_positions_multiple),
                max_model_len=info.max_model_len,
                state_per_slot=info.state_bytes_total // max(1, info.slots_total),
                slots=info.slots_total,
            ),
            tokenizer_fingerprint=info.tokenizer_fingerprint,
            step_seconds=info.step_seconds,
            step_cached=info.step_cached,
            seconds_per_cached=info.seconds_per_cached,
            max_rows=info.max_rows,
            activations=info.activations,
        )

    @property
    def size(self) -> int:
        """Parameters without embeddings and output head."""
        return self.parameters - self.embedding_parameters

    @property
    def on_gpu(self) -> bool:
        """Whether the model ran on a GPU."""
        return not self.device.startswith("cpu")

    def step_times(self, positions: int | None) -> StepTimes:
        """Return the seconds of passes over sequences of this length; None: as measured."""
        times = StepTimes(self.step_seconds, self.step_cached, self.seconds_per_cached, self.max_rows)
        times.cached = self.step_cached if positions is None else positions
        return times


@dataclass(frozen=True)
class Acceptance:
    """Acceptance of a draft's tokens by the target."""

    agreement: float
    """Share of the target's tokens that the draft predicts from the tokens before them."""
    by_position: list[float]
    """Share of rounds that accept at least 1, 2, ... draft tokens."""
    lengths: list[float]
    """Mean acceptance length by number of draft tokens; 1 without any."""
    recordings: Sequence[Recording] = ()
    """The target's answers, for the simulation of draft methods. Empty for running workers."""


def replay_acceptance(recordings: Sequence[Recording], max_k: int) -> Acceptance:
    """Compute acceptance for 0 to `max_k` draft tokens from where a draft agrees with the target's answers."""
    agreed = [*zip(*(each.prediction.agreed for each in recordings), strict=True)]
    lengths = [mean_acceptance_length(agreed, k) for k in range(max_k + 1)]
    return Acceptance(agreement_rate(agreed[0]), acceptance_by_position(agreed, max_k), lengths, recordings)


def constant_acceptance(rate: float, max_k: int) -> Acceptance:
    """Compute acceptance for 0 to `max_k` draft tokens, each accepted at this rate if all previous ones are."""
    by_position = [rate**k for k in range(1, max_k + 1)]
    return Acceptance(rate, by_position, [1 + sum(by_position[:k]) for k in range(max_k + 1)])


@dataclass(frozen=True)
class MeasuredPair:
    """Costs and acceptance of a target and a draft."""

    costs: RoundCosts
    lengths: Sequence[float]
    """Mean acceptance length by number of draft tokens; 1 without any."""
    shared: bool
    """Whether both share a device, so that only one of them runs at a time."""
    carried: bool
    """Whether the target worker carries the draft, so that drafts take no messages."""

    def sequential_speed(self, batch: int, k: int) -> float:
        """Return the tokens per second if the whole batch is drafted, then verified."""
        return batch * self.lengths[k] / self.costs.seconds(batch, [batch] * k)

    def colocated_speed(self, batch: int, k: int) -> float:
        """Return the tokens per second if the target worker carries the draft, so that drafts take no messages."""
        costs = replace(self.costs, has_own_draft=True)
        return batch * self.lengths[k] / costs.seconds(batch, [batch] * k)

    def overlapped_speed(self, batch: int, k: int) -> float:
        """Tokens per second if half of the batch is drafted while the other half is verified; 0 if impossible."""
        if self.shared or k == 0 or batch == 1:
            return 0.0
        draft, verify = self.draft_seconds(batch / 2, k), self.verify_seconds(batch / 2, k)
        # In one period, each worker serves both halves, and each half visits both workers.
        period = max(2 * draft, 2 * verify, draft + verify + 2 * self.costs.exchange)
        return batch * self.lengths[k] / period

    def round_seconds(self, batch: int, step_rows: Sequence[int], num_draft_tokens: int) -> float:
        """Return the seconds of a round that verifies `num_draft_tokens`. `step_rows`: rows of each draft step."""
        costs = self.costs
        draft = sum(map(costs.draft, step_rows))
        calls_draft = bool(step_rows) and not self.carried
        seconds = costs.seconds(batch, [], num_draft_tokens) + draft + costs.exchange * calls_draft
        if not calls_draft or self.shared or batch == 1:
            return seconds
        half = sum(costs.draft(rows / 2) for rows in step_rows), costs.verify((batch + num_draft_tokens) / 2)
        return min(seconds, max(2 * half[0], 2 * half[1], sum(half) + 2 * costs.exchange))

    def draft_seconds(self, batch: float, k: int) -> float:
        """Return the seconds of a round in the draft worker."""
        return k * self.costs.draft(batch)

    def verify_seconds(self, batch: float, k: int) -> float:
        """Return the seconds of a round in the target worker."""
        return self.costs.verify(batch * (k + 1))


@dataclass(frozen=True)
class Speed:
    """Predicted speed of a batch with k draft tokens."""

    batch: int
    k: int
    tokens_per_second: float
    of_plain: float
    """Relative to plain decoding."""
    groups: int
    """Groups in flight: 1 (drafted, then verified) or 2 (overlapping halves), whichever is faster."""
    separate: float | None = None
    """Tokens per second with a draft worker instead of a carried draft. None: `tokens_per_second` assumes one."""


@dataclass(frozen=True)
class Workers:
    """Numbers of draft and target workers that keep every target worker busy."""

    draft: int
    target: int


def predict(pair: MeasuredPair, batches: Iterable[int]) -> list[Speed]:
    """Predict the speed of every batch with every number of draft tokens, from 0 (plain decoding)."""
    speeds = []
    for batch in batches:
        plain = pair.sequential_speed(batch, 0)
        for k in range(len(pair.lengths)):
            sequential, overlapped = pair.sequential_speed(batch, k), pair.overlapped_speed(batch, k)
            separate, groups = max(sequential, overlapped), 2 if overlapped > sequential else 1
            speed = pair.colocated_speed(batch, k) if pair.carried else separate
            speeds.append(Speed(batch, k, speed, speed / plain, groups, separate if pair.carried else None))
    return speeds


def balanced_workers(pair: MeasuredPair, batch: int, k: int) -> Workers:
    """Compute how many targets one draft worker can feed, or how many draft workers one target needs."""
    if k == 0 or pair.carried:
        return Workers(0, 1)
    if pair.shared:
        return Workers(1, 1)
    ratio = pair.draft_seconds(batch, k) / pair.verify_seconds(batch, k)
    return Workers(1, math.floor(1 / ratio)) if ratio <= 1 else Workers(math.ceil(ratio), 1)
