"""A draft model with its observed acceptance, reliability and speed. Pure."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from math import sqrt
from typing import NamedTuple

from specpool.drafting.acceptance import FIRST_RATE, Acceptance, Calibration
from specpool.drafting.costs import UNKNOWN_DRAFT, StepTimes
from specpool.protocol.features import FeatureSpec

# Tried draft tokens per sample, all from one sequence, because tokens of a sequence are not independent.
SAMPLE_TOKENS = 128
# Prior of the acceptance rate: weight in tokens, and standard deviation.
PRIOR_TOKENS, PRIOR_DEVIATION = 64.0, 0.25
# Weight of one draft call in the reliability. A failed call counts as several: it also costs caches and a backoff.
CALL_WEIGHT, FAILURE_CALLS = 1 / 256, 32

DraftKey = tuple[str, str]
"""The operator's name for a draft, or "", and the fingerprint of its weights."""


class Estimate(NamedTuple):
    """A mean and its standard error."""

    mean: float
    error: float


@dataclass
class Evidence:
    """Discounted samples of a draft model's acceptance rate."""

    samples: int = 0
    """Number of samples ever added."""
    _weight: float = 0.0
    _sum: float = 0.0
    _weights_squared: float = 0.0
    _products: float = 0.0
    """Sum of weight squared times rate."""
    _squares: float = 0.0
    """Sum of weight squared times rate squared."""

    def add(self, tried: float, accepted: float) -> None:
        """Add a sample: the tried draft tokens of a sequence, and how many of them were accepted."""
        self.samples += 1
        self._weight += tried
        self._sum += accepted
        self._weights_squared += tried**2
        self._products += tried * accepted
        self._squares += accepted**2

    def discount(self, factor: float) -> None:
        """Lower the weight of all samples so far."""
        self._weight *= factor
        self._sum *= factor
        self._weights_squared *= factor**2
        self._products *= factor**2
        self._squares *= factor**2

    @property
    def rate(self) -> Estimate:
        """The acceptance rate. The error comes from the differences between samples."""
        weight = self._weight + PRIOR_TOKENS
        mean = (self._sum + PRIOR_TOKENS * FIRST_RATE) / weight
        spread = self._squares - 2 * mean * self._products + mean**2 * self._weights_squared
        return Estimate(mean, sqrt(max(0.0, spread) + (PRIOR_TOKENS * PRIOR_DEVIATION) ** 2) / weight)


@dataclass(eq=False)
class DraftModel:
    """A draft model behind one or more draft workers."""

    key: DraftKey = ("", "")
    name: str = ""
    """Unique among the drafts of a target worker."""
    model: str = ""
    max_model_len: int = 0
    max_branches: int = 0
    """Maximum branches of a sequence. 0: the model cannot draft during a verification."""
    features: FeatureSpec | None = None
    """Hidden states of the target that the draft reads."""
    step_times: StepTimes = field(default_factory=lambda: StepTimes(UNKNOWN_DRAFT))
    """Step times of all ready workers together."""
    share: float = 0.0
    """Current share of new sequences."""
    acceptance: Acceptance = field(default_factory=Acceptance)
    """Acceptance over all sequences: the prior of a new one."""
    calibration: Calibration = field(default_factory=Calibration)
    evidence: Evidence = field(default_factory=Evidence)
    reliability: float = 1.0
    """Recent share of calls answered in time."""
    draft_tokens: int = 0
    accepted_draft_tokens: int = 0
    rounds: int = 0
    """Rounds, counted once per sequence."""
    completion_tokens: int = 0
    """Tokens generated in these rounds."""
    _open: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Tried and accepted tokens of incomplete samples, by sequence id."""

    def observe_call(self, *, is_answered: bool, is_failure: bool = False) -> None:
        """Record a call to a worker. `is_failure`: the call failed, rather than being late."""
        weight = CALL_WEIGHT * (FAILURE_CALLS if is_failure else 1)
        self.reliability += weight * (is_answered - self.reliability)

    def observe_round(self, num_tokens: int, drafted: int, accepted: int) -> None:
        """Count a round of one sequence. `drafted`: draft tokens of this model that were verified."""
        self.rounds += 1
        self.completion_tokens += num_tokens
        self.draft_tokens += drafted
        self.accepted_draft_tokens += accepted

    def add_tokens(self, sequence_id: int, drafted: float, accepted: float) -> tuple[float, float] | None:
        """Record draft tokens of a sequence. Return the sample once it is complete, else None."""
        before = self._open.pop(sequence_id, (0.0, 0.0))
        sample = before[0] + min(drafted, accepted + 1), before[1] + accepted
        if sample[0] >= SAMPLE_TOKENS:
            return sample
        self._open[sequence_id] = sample
        return None

    def end(self, sequence_ids: Iterable[int]) -> list[tuple[float, float]]:
        """Return the incomplete samples of sequences that have ended or moved."""
        ended = (self._open.pop(sequence_id, None) for sequence_id in sequence_ids)
        return [sample for sample in ended if sample is not None and sample[0]]
