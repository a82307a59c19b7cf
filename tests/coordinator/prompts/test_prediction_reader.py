"""Reading predictions: any text or token ids become target tokens, or an error that names the field."""

import asyncio
import json

from hypothesis import given, settings
from hypothesis import strategies as st
from local_prompts import local_pool
from tiny_tokenizers import FALLBACK

from coordinator.prompts.description import TokenizerDescription
from coordinator.prompts.prediction_reader import check_prediction, read_prediction
from coordinator.prompts.token_reader import TokenReader
from coordinator.prompts.tokenizer import BYTES_PER_TOKEN
from coordinator.prompts.tokenizer_pool import TokenizerPool
from specpool.protocol.errors import InvalidArgumentError
from specpool.protocol.tokenizer import TokenizerFiles
from specpool.v1 import generation_pb2 as pb

VOCAB_SIZE = FALLBACK.get_vocab_size()
MAX_TOKENS = 24
TEXTS = st.text(max_size=40) | st.text("ab ", max_size=80)
IDS = st.lists(st.integers(0, 2**32 - 1) | st.integers(0, VOCAB_SIZE + 1), max_size=MAX_TOKENS + 3)


def read(prediction: pb.Prediction) -> tuple[int, ...] | InvalidArgumentError:
    """Return the prediction's tokens, or the refusal."""

    async def reading(pool: TokenizerPool, reader: TokenReader) -> tuple[int, ...]:
        check_prediction(pb.SpeculativeParams(prediction=prediction), reader)
        return await read_prediction(prediction, "client", reader, pool, lambda: None)

    async def with_tokenizer() -> tuple[int, ...]:
        pool = local_pool(10)
        description = await pool.load(with_bos(), VOCAB_SIZE)
        assert isinstance(description, TokenizerDescription)
        try:
            return await reading(pool, TokenReader(description, MAX_TOKENS + 1, VOCAB_SIZE))
        finally:
            await pool.close()

    try:
        return asyncio.run(with_tokenizer())
    except InvalidArgumentError as error:
        return error


def with_bos() -> TokenizerFiles:
    """Return a tokenizer that adds a special token before each prompt."""
    content = json.loads(FALLBACK.to_str())
    begin = {"id": "<s>", "ids": [FALLBACK.token_to_id("<s>")], "tokens": ["<s>"]}
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": begin},
    }
    return TokenizerFiles(json.dumps(content).encode(), "", {}, ())


@settings(deadline=None)
@given(TEXTS)
def test_text_is_tokenized_without_special_tokens(text: str) -> None:
    expected = FALLBACK.encode(text, add_special_tokens=False).ids
    result = read(pb.Prediction(text=text))
    if 0 < len(expected) <= MAX_TOKENS:
        assert result == tuple(expected)
    else:
        assert isinstance(result, InvalidArgumentError)
        assert result.field == "speculative.prediction.text"
        assert result.reason == "must not be empty" or result.limit is not None


@settings(deadline=None)
@given(IDS)
def test_token_ids_are_checked(token_ids: list[int]) -> None:
    result = read(pb.Prediction(tokenized=pb.TokenizedInput(input_ids=token_ids)))
    if 0 < len(token_ids) <= MAX_TOKENS and max(token_ids) < VOCAB_SIZE:
        assert result == tuple(token_ids)
    else:
        assert isinstance(result, InvalidArgumentError)
        assert result.field == "speculative.prediction.tokenized.input_ids"


def test_a_long_text_is_refused_with_the_limit_before_all_of_it_is_tokenized() -> None:
    text = "b" * (BYTES_PER_TOKEN * MAX_TOKENS + 1)
    refusal = read(pb.Prediction(text=text))
    assert isinstance(refusal, InvalidArgumentError)
    assert (refusal.field, refusal.limit) == ("speculative.prediction.text", MAX_TOKENS)
    assert refusal.reason == f"has more than {MAX_TOKENS} tokens"
