"""Answers continue the prompt's text, even if the tokenizer's decoder strips the first space."""

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest
from serving import RecordingTarget, Serving, serving, stream
from tiny_tokenizers import FALLBACK

from specpool.v1 import generation_pb2 as pb

SPACE_A, SPACE_B = FALLBACK.token_to_id("▁a"), FALLBACK.token_to_id("▁b")


class AlternatingTarget(RecordingTarget):
    """A target that says "a b a b"."""

    def choose(self, context: Sequence[int]) -> int:
        return SPACE_A if context[-1] == SPACE_B else SPACE_B

    async def GetWorkerInfo(self, request: Any, context: Any) -> Any:
        response = await super().GetWorkerInfo(request, context)
        response.model.vocab_size = FALLBACK.get_vocab_size()
        return response

    async def GetTokenizer(self, request: Any, context: Any) -> Any:
        response = await super().GetTokenizer(request, context)
        response.tokenizer_json = FALLBACK.to_str().encode()
        return response


@pytest.fixture
async def served() -> AsyncIterator[Serving]:
    async with serving(AlternatingTarget(), with_draft=False) as running:
        yield running


def request_of(n: int = 1, temperature: float = 0.0, stop: Sequence[str] = (), **prompt: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(
        sampling_params=pb.SamplingParams(max_tokens=4, n=n, temperature=temperature, stop=stop), **prompt
    )


CHAT = pb.ChatInput(messages=[{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    "prompt",
    [{"text": "a"}, {"tokenized": pb.TokenizedInput(input_ids=[SPACE_A])}, {"chat": CHAT}],
    ids=["text", "token ids", "chat"],
)
async def test_every_sample_keeps_its_first_space(served: Serving, prompt: dict[str, Any]) -> None:
    response = await served.stub.Generate(request_of(n=2, temperature=1.0, **prompt))
    assert [response.text, *(sample.text for sample in response.other_samples)] == [" b a b a"] * 2
    chunks, complete = await stream(served, request_of(**prompt))
    assert "".join(chunk.text for chunk in chunks) == complete.text == " b a b a"


async def test_a_stop_string_may_begin_with_the_first_space(served: Serving) -> None:
    response = await served.stub.Generate(request_of(stop=[" b"], text="a"))
    assert (response.text, response.matched_stop_str, list(response.token_ids)) == ("", " b", [SPACE_B])
