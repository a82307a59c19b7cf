"""Speculation statistics of one sequence. Pure."""

from dataclasses import dataclass, field


@dataclass
class SpeculationStats:
    """Draft tokens and acceptance, over the rounds that verified at least one draft token.

    A round emits one token more than it accepts. If a stop cuts the round short, the last emitted token counts as the
    bonus token; it and all later draft tokens count as not accepted.
    """

    rounds: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    histogram: list[int] = field(default_factory=list)
    """At index i: rounds that accepted exactly i draft tokens."""

    def add(self, drafted: int, accepted: int) -> None:
        if drafted == 0:
            return
        self.rounds += 1
        self.draft_tokens += drafted
        self.accepted_tokens += accepted
        self.histogram.extend([0] * (accepted + 1 - len(self.histogram)))
        self.histogram[accepted] += 1

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens gained per round, bonus included; 0 without rounds."""
        return 1 + self.accepted_tokens / self.rounds if self.rounds else 0.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted over drafted; 0 if nothing was drafted."""
        return self.accepted_tokens / self.draft_tokens if self.draft_tokens else 0.0
