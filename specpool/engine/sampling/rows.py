"""Rows of logits of a pass, by sequence, and the tokens chosen from them."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import islice

from specpool.engine.sampling.rules import Changes, SequenceRules
from specpool.protocol.sampling import NO_LOGPROBS, Logprobs, SamplingParams


@dataclass(slots=True)  # not frozen, like `Span`
class SequenceRows:
    """Rows of logits that follow the last tokens of one sequence."""

    rules: SequenceRules | None
    """None: greedy."""
    token_ids: Sequence[int]
    """The whole sequence. The last `count` - 1 tokens are a draft."""
    count: int
    num_logprobs: int | None = None
    """Number of top log-probabilities per row. None: no log-probabilities."""
    prefix_length: int | None = None
    """Of a branch: the leading tokens that it shares with its sequence."""

    @property
    def params(self) -> SamplingParams | None:
        """The sampling parameters. None: greedy."""
        return None if self.rules is None else self.rules.params

    @property
    def lengths(self) -> range:
        """The context length of each row."""
        return range(len(self.token_ids) - self.count + 1, len(self.token_ids) + 1)

    @property
    def draft(self) -> Sequence[int]:
        """The draft token at the position of each row but the last."""
        return self.token_ids[self.lengths.start :]

    def changes(self) -> list[Changes | None]:
        """The changes of each row's logits. None: no change."""
        if self.rules is None:
            return [None] * self.count
        if self.prefix_length is None:
            return self.rules.changes(self.token_ids, self.count)
        # The rules keep the state of the sequence. Other branches and the sequence itself continue from the prefix.
        self.rules.truncate(self.prefix_length)
        changes = self.rules.changes(self.token_ids, self.count)
        self.rules.truncate(self.prefix_length)
        return changes

    def accepted(self, choices: Iterable[int]) -> list[int]:
        """The choices up to the first that rejects a draft token. Later ones are not read."""
        token_ids: list[int] = []
        draft = self.draft
        for token in islice(choices, self.count):
            token_ids.append(token)
            if len(token_ids) <= len(draft) and token != draft[len(token_ids) - 1]:
                break
        return token_ids


@dataclass(frozen=True)
class Chosen:
    """The tokens chosen for one sequence, up to the first that rejects a draft token."""

    token_ids: list[int]
    finite: bool = True
    """False if the largest logit of a row is not finite."""
    logprobs: Logprobs = NO_LOGPROBS
    """Log-probabilities of `token_ids`, if requested."""
