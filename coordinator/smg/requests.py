"""Converts the gateway's requests to our own API, which validates them.

Unsupported fields are rejected by name, including fields of later versions.
"""

from itertools import islice

from smg_grpc_proto import vllm_engine_pb2 as smg

from coordinator.prompts.constraint_reader import MAX_CHOICES
from coordinator.requests.validation import MAX_LOGIT_BIASES
from specpool.protocol.errors import InvalidArgumentError
from specpool.v1 import generation_pb2 as pb

REQUEST_FIELDS = {"request_id", "tokenized", "text", "sampling_params", "stream"}
# Fields with the same name and meaning. Where smg cannot leave a field unset, 0 means unset, as in vLLM.
SAME = {
    "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "max_tokens",
    "min_tokens", "ignore_eos", "n", "logprobs",
}  # fmt: skip
CONVERTED = {"top_k", "seed", "stop", "stop_token_ids", "logit_bias", "choice"}
# Detokenization options, which the gateway applies itself.
DETOKENIZATION = {"skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"}
CONSTRAINTS = {"json_schema", "regex", "grammar", "structural_tag", "json_object"}
# Options that describe what this server always does.
GIVEN = {"grammar_from_first_token"}

UNSET_TEMPERATURE = 1.0
"""Default temperature of OpenAI's API and vLLM. In our own API the default is 0."""
INT32_MAX = 2**31 - 1


def generate_request(message: smg.GenerateRequest) -> pb.GenerateRequest:
    """Convert a request. Raises InvalidArgumentError for unsupported fields."""
    for field, _ in message.ListFields():
        if field.name not in REQUEST_FIELDS:
            raise InvalidArgumentError(field.name, "is not supported")
    request = pb.GenerateRequest(
        request_id=message.request_id, sampling_params=_sampling_params(message.sampling_params)
    )
    if message.WhichOneof("input") == "text":
        request.text = message.text
    elif message.WhichOneof("input") == "tokenized":
        request.tokenized.SetInParent()
        request.tokenized.input_ids.MergeFrom(message.tokenized.input_ids)
    return request


def _sampling_params(message: smg.SamplingParams) -> pb.SamplingParams:
    params = pb.SamplingParams(temperature=UNSET_TEMPERATURE)
    params.stop.MergeFrom(message.stop)
    params.stop_token_ids.MergeFrom(message.stop_token_ids)
    for field, value in message.ListFields():
        if field.name in SAME | CONSTRAINTS:
            setattr(params, field.name, value)
        elif field.name not in CONVERTED | DETOKENIZATION | GIVEN:
            raise InvalidArgumentError(f"sampling_params.{field.name}", "is not supported")
    if message.top_k:
        params.top_k = min(message.top_k, INT32_MAX)  # above any vocabulary size
    if message.HasField("choice"):
        params.choice.choices.extend(islice(message.choice.choices, MAX_CHOICES + 1))  # validation rejects more
    if message.HasField("seed"):
        params.seed = message.seed % 2**64
    for token, bias in islice(message.logit_bias.items(), MAX_LOGIT_BIASES + 1):  # validation rejects more
        if token < 0:
            raise InvalidArgumentError("sampling_params.logit_bias", f"token id {token} must not be negative")
        params.logit_bias[token] = bias
    return params
