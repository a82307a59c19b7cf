"""Log-probabilities come with the texts of their tokens."""

from serving import make_request, serving, stream
from tiny_tokenizers import BYTES


async def test_logprobs_have_the_texts_of_their_tokens() -> None:
    async with serving() as served:
        chunks, complete = await stream(served, make_request([1], 24, logprobs=2, temperature=1.0, seed=3))
        streamed = [logprobs for chunk in chunks for logprobs in chunk.logprobs]
        assert streamed == list(complete.logprobs)
        assert [each.text for each in streamed] == [BYTES.decode([token]) for token in complete.token_ids]
        for each in streamed:
            assert list(each.top_texts) == [BYTES.decode([token]) for token in each.top_token_ids]
