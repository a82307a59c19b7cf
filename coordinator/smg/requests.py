"""The gateway's requests, as requests of our own API, where they are validated. What we cannot do is refused by name,
including fields of later versions."""

from itertools import islice

from smg_grpc_proto import vllm_engine_pb2 as smg

from coordinator.requests.validation import MAX_LOGIT_BIASES
from specpool.protocol.errors import InvalidArgumentError
from specpool.v1 import generation_pb2 as pb

REQUEST_FIELDS = {"request_id", "tokenized", "text", "sampling_params", "stream"}
# Fields of the same name and meaning. Where smg cannot leave one unset, 0 means unset, as in vLLM.
SAME = {
    "temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty", "max_tokens",
    "min_tokens", "ignore_eos", "n", "logprobs",
}  # fmt: skip
CONVERTED = {"top_k", "seed", "stop", "stop_token_ids", "logit_bias"}
# How tokens become text, which is up to the gateway.
OF_THE_GATEWAY = {"skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output"}
STRUCTURED = {"json_schema", "regex", "grammar", "structural_tag", "json_object", "choice", "grammar_from_first_token"}

UNSET_TEMPERATURE = 1.0
"""Temperature of a request that sets none: that of OpenAI's API and of vLLM. Unset means 0 in our own API."""
INT32_MAX = 2**31 - 1


def generate_request(asked: smg.GenerateRequest) -> pb.GenerateRequest:
    """The same request in our own API. InvalidArgumentError for a field that it does not have."""
    for field, _ in asked.ListFields():
        if field.name not in REQUEST_FIELDS:
            raise InvalidArgumentError(field.name, "is not supported")
    request = pb.GenerateRequest(request_id=asked.request_id, sampling_params=_sampling_params(asked.sampling_params))
    if asked.WhichOneof("input") == "text":
        request.text = asked.text
    elif asked.WhichOneof("input") == "tokenized":
        request.tokenized.SetInParent()
        request.tokenized.input_ids.MergeFrom(asked.tokenized.input_ids)
    return request


def _sampling_params(asked: smg.SamplingParams) -> pb.SamplingParams:
    params = pb.SamplingParams(temperature=UNSET_TEMPERATURE)
    params.stop.MergeFrom(asked.stop)
    params.stop_token_ids.MergeFrom(asked.stop_token_ids)
    for field, value in asked.ListFields():
        if field.name in SAME:
            setattr(params, field.name, value)
        elif field.name in STRUCTURED:
            raise InvalidArgumentError(f"sampling_params.{field.name}", "structured outputs are not supported")
        elif field.name not in CONVERTED | OF_THE_GATEWAY:
            raise InvalidArgumentError(f"sampling_params.{field.name}", "is not supported")
    if asked.top_k:
        params.top_k = min(asked.top_k, INT32_MAX)  # no vocabulary is larger
    if asked.HasField("seed"):
        params.seed = asked.seed % 2**64
    for token, bias in islice(asked.logit_bias.items(), MAX_LOGIT_BIASES + 1):  # more are refused anyway
        if token < 0:
            raise InvalidArgumentError("sampling_params.logit_bias", f"token id {token} is negative")
        params.logit_bias[token] = bias
    return params
