"""The reasoning block of an answer: its tags, whether a prompt ends within it, and the limits of a request."""

from collections.abc import Sequence
from dataclasses import dataclass

from specpool.protocol.errors import InvalidArgumentError
from specpool.protocol.sampling import Reasoning
from specpool.v1 import generation_pb2 as pb

AFTER, MAX_TOKENS = "sampling_params.constraint_after_reasoning", "sampling_params.max_thinking_tokens"


@dataclass(frozen=True)
class ReasoningTags:
    """The texts and tokens around a model's reasoning."""

    begin: str
    end: str
    begin_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    answer_ids: tuple[int, ...] = ()
    """What the model writes between the end tag and the answer."""

    def num_open(self, prompt_ids: Sequence[int]) -> int | None:
        """Return the number of prompt tokens within an open reasoning block; None without one."""
        newest_first = tuple(reversed(prompt_ids))
        begin, end = (_first(newest_first, ids[::-1]) for ids in (self.begin_ids, self.end_ids))
        return begin if begin is not None and (end is None or begin < end) else None


def check_reasoning(params: pb.SamplingParams, tags: ReasoningTags | None) -> None:
    """Raise InvalidArgumentError if the model does not support a request's options of reasoning."""
    if params.constraint_after_reasoning and params.WhichOneof("constraint") is None:
        raise InvalidArgumentError(AFTER, "must be given with a constraint")
    given = [AFTER] * params.constraint_after_reasoning + [MAX_TOKENS] * params.HasField("max_thinking_tokens")
    if given and tags is None:
        raise InvalidArgumentError(given[0], "the model has no reasoning tags; see the server's --reasoning-tags")


def read_reasoning(
    params: pb.SamplingParams, tags: ReasoningTags | None, starts_inside: bool, max_tokens: int
) -> Reasoning | None:
    """Return the limits that a checked request sets; None if nothing can exceed them. `max_tokens`: of the answer."""
    if tags is None:
        return None
    limit = params.max_thinking_tokens if params.HasField("max_thinking_tokens") else max_tokens
    grammar_after = params.constraint_after_reasoning
    if limit >= max_tokens and not grammar_after:
        return None
    return Reasoning(
        begin=tags.begin_ids,
        end=tags.end_ids + (tags.answer_ids if grammar_after else ()),
        starts_inside=starts_inside,
        max_tokens=limit if limit < max_tokens else None,
        grammar_after=grammar_after,
    )


def _first(ids: tuple[int, ...], part: tuple[int, ...]) -> int | None:
    """Return the position of the first occurrence; None without one."""
    at = -1
    try:
        while True:
            at = ids.index(part[0], at + 1)
            if ids[at : at + len(part)] == part:
                return at
    except ValueError:
        return None
