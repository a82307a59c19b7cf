"""Reads the limits on reasoning from requests."""

from coordinator.prompts.reasoning import ReasoningTags
from specpool.protocol.errors import InvalidArgumentError
from specpool.protocol.sampling import Reasoning
from specpool.v1 import generation_pb2 as pb

AFTER, MAX_TOKENS = "sampling_params.constraint_after_reasoning", "sampling_params.max_thinking_tokens"


def check_reasoning(params: pb.SamplingParams, tags: ReasoningTags | None) -> None:
    """Raise InvalidArgumentError if the model or the constraint does not support the request's reasoning options."""
    after, is_limited = params.constraint_after_reasoning, params.HasField("max_thinking_tokens")
    is_constrained = params.WhichOneof("constraint") is not None
    if after and not is_constrained:
        raise InvalidArgumentError(AFTER, "must be given with a constraint")
    if is_limited and is_constrained and not after:
        raise InvalidArgumentError(MAX_TOKENS, "with a constraint, requires constraint_after_reasoning")
    given = [AFTER] * after + [MAX_TOKENS] * is_limited
    if given and tags is None:
        raise InvalidArgumentError(given[0], "the model has no reasoning tags; see the server's --reasoning-tags")


def read_reasoning(
    params: pb.SamplingParams, tags: ReasoningTags | None, starts_inside: bool, max_tokens: int
) -> Reasoning | None:
    """Return the limits of a valid request. None if nothing can exceed them. `max_tokens`: of the whole answer."""
    grammar_after = params.constraint_after_reasoning
    if tags is None or (params.WhichOneof("constraint") is not None and not grammar_after):
        return None
    limit = params.max_thinking_tokens if params.HasField("max_thinking_tokens") else max_tokens
    if limit >= max_tokens and not grammar_after:
        return None
    return Reasoning(
        begin=tags.begin_ids,
        end=tags.end_ids + (tags.answer_ids if grammar_after else ()),
        starts_inside=starts_inside,
        max_tokens=limit if limit < max_tokens else None,
        grammar_after=grammar_after,
        leading=tags.leading_ids,
    )
