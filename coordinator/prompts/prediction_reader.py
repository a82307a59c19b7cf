"""Validates and tokenizes a request's prediction, like a prompt but without special tokens."""

from coordinator.prompts.token_reader import TokenReader
from coordinator.prompts.tokenizer_pool import Check, Prompt, TokenizerPool
from specpool.protocol.errors import InvalidArgumentError
from specpool.v1 import generation_pb2 as pb

PREDICTION = "speculative.prediction"
FIELDS = {"text": f"{PREDICTION}.text", "tokenized": f"{PREDICTION}.tokenized.input_ids"}

# Methods that accept a prediction. If unset, the request uses the server's default method and the prediction.
PREDICTING = {pb.DRAFT_METHOD_UNSPECIFIED, pb.DRAFT_METHOD_BEST, pb.DRAFT_METHOD_PREDICTION}


def check_prediction(params: pb.SpeculativeParams, reader: TokenReader) -> None:
    """Check everything about a prediction that does not need tokenization. Raises InvalidArgumentError."""
    if not params.HasField("prediction"):
        if params.method == pb.DRAFT_METHOD_PREDICTION:
            raise InvalidArgumentError("speculative.method", f"prediction requires {PREDICTION}")
        return
    if params.method not in PREDICTING:
        method = pb.DraftMethod.Name(params.method).removeprefix("DRAFT_METHOD_").lower()
        raise InvalidArgumentError(PREDICTION, f"requires the method best or prediction, not {method}")
    kind = params.prediction.WhichOneof("content")
    if kind is None:
        raise InvalidArgumentError(PREDICTION, f"one of {', '.join(FIELDS)} must be set")
    if kind == "tokenized":
        reader.check_length(FIELDS[kind], len(params.prediction.tokenized.input_ids))
    else:
        reader.check_bytes(FIELDS[kind], len(params.prediction.text.encode()))


async def read_prediction(
    prediction: pb.Prediction, client: str, reader: TokenReader, pool: TokenizerPool, before: Check
) -> tuple[int, ...]:
    """Return the token ids of a prediction that `check_prediction` accepted. `before` runs right before tokenization.

    Raises InvalidArgumentError, QueueFullError, UnavailableError, and the errors of `before`.
    """
    if prediction.HasField("tokenized"):
        return await reader.token_ids(FIELDS["tokenized"], prediction.tokenized)
    text = prediction.text
    prompt = Prompt(
        client, len(text.encode()), lambda: text, False, reader.max_tokens, reader.max_bytes, add_special_tokens=False
    )
    return await reader.encode(FIELDS["text"], prompt, pool, before)
