"""Token counts in OpenAI's format."""

from openai.types import CompletionUsage
from openai.types.completion_usage import CompletionTokensDetails, PromptTokensDetails

from specpool.openai.answers import Usage
from specpool.v1 import generation_pb2 as pb


def test_samples_add_up_and_share_their_prompt() -> None:
    counts = {
        "prompt_tokens": 9, "completion_tokens": 5, "cached_tokens": 4,
        "accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1,
    }  # fmt: skip
    usage = Usage()
    for index in range(2):
        usage.add(pb.GenerateResponse(index=index, usage=pb.Usage(**counts)))
    assert CompletionUsage.model_validate(usage.shown()) == CompletionUsage(
        prompt_tokens=9,
        completion_tokens=10,
        total_tokens=19,
        prompt_tokens_details=PromptTokensDetails(cached_tokens=4),
        completion_tokens_details=CompletionTokensDetails(accepted_prediction_tokens=6, rejected_prediction_tokens=2),
    )
