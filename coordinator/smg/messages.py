"""Converts between the gateway's messages and our own requests, results and state.

Unsupported fields are rejected by name, including fields of later versions.
"""

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from itertools import islice

from smg_grpc_proto import vllm_engine_pb2 as smg

from coordinator.prompts.constraint_reader import MAX_CHOICES
from coordinator.requests.generation import Sample
from coordinator.requests.validation import MAX_LOGIT_BIASES
from coordinator.scheduling.commits import Commit
from coordinator.serving.coordinator import Coordinator
from specpool.protocol.errors import InvalidArgumentError
from specpool.protocol.sampling import TokenLogprobs
from specpool.v1 import common_pb2
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

NO_TOKENIZER = "/dev/null"
"""A path without a tokenizer, so that smg requests ours. Otherwise it would load one from its own disk or from the hub,
which may differ."""


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


def chunk(sample: Sample, commit: Commit) -> smg.GenerateResponse:
    """Build the message of a sample's next tokens."""
    message = smg.GenerateStreamChunk(
        token_ids=commit.token_ids,
        prompt_tokens=sample.sequence.prompt_length,
        completion_tokens=len(commit.token_ids),
        cached_tokens=sample.sequence.cached_tokens,
        index=sample.index,
    )
    if commit.logprobs:
        _add_logprobs(message.output_logprobs, commit.token_ids, commit.logprobs)
    return smg.GenerateResponse(chunk=message)


def end(sample: Sample) -> smg.GenerateResponse:
    """Build the last message of a streamed sample."""
    sequence, finish = sample.sequence, sample.sequence.finish
    assert finish is not None
    return smg.GenerateResponse(
        complete=smg.GenerateComplete(
            finish_reason=finish.reason,
            index=sample.index,
            prompt_tokens=sequence.prompt_length,
            completion_tokens=sequence.num_generated,
            cached_tokens=sequence.cached_tokens,
            matched_token_id=finish.matched_token_id,
            matched_stop_str=finish.matched_stop,
            spec_accepted_tokens=sequence.speculation.accepted_tokens,
            spec_draft_tokens=sequence.speculation.draft_tokens,
        )
    )


async def complete(sample: Sample) -> smg.GenerateResponse:
    """Build the message of a finished sample, with all of its tokens."""
    message = end(sample)
    token_ids, start = sample.sequence.generated_ids, 0
    message.complete.output_ids.extend(token_ids)
    async for logprobs in sample.logprobs():
        _add_logprobs(message.complete.output_logprobs, token_ids[start : start + len(logprobs)], logprobs)
        start += len(logprobs)
    return message


def _add_logprobs(message: smg.OutputLogProbs, token_ids: Sequence[int], logprobs: Iterable[TokenLogprobs]) -> None:
    for token_id, entry in zip(token_ids, logprobs, strict=True):
        message.token_ids.append(token_id)
        message.token_logprobs.append(entry.logprob)
        message.top_logprobs.add(token_ids=entry.top_token_ids, values=entry.top_logprobs)


def model_info(coordinator: Coordinator) -> smg.GetModelInfoResponse:
    """Describe the target to the gateway. Raises UnavailableError until the target worker was ready."""
    tokenizer, model = coordinator.tokenizer, coordinator.model
    assert model is not None
    return smg.GetModelInfoResponse(
        model_path=model.model,
        tokenizer_path=NO_TOKENIZER,
        served_model_name=coordinator.served_model_name,
        is_generation=True,
        max_context_length=coordinator.max_model_len,
        max_req_input_len=coordinator.max_model_len - 1,
        vocab_size=model.vocab_size,
        model_type=model.architecture,
        eos_token_ids=tokenizer.files.eos_token_ids,
    )


def loads(
    coordinator: Coordinator, target_loads: Sequence[common_pb2.WorkerLoad], version: str
) -> smg.GetLoadsResponse:
    """Describe the load of the coordinator, and of the target workers whose load is known."""
    running, waiting = coordinator.lanes.running, coordinator.queue.queued
    total = sum(load.kv_positions_total for load in target_loads)
    used = total - sum(load.kv_positions_free for load in target_loads)
    prompt_tokens = coordinator.in_flight.prompt_tokens
    core = smg.SchedulerLoad(
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_total_reqs=running + waiting,
        num_used_tokens=used,
        max_total_num_tokens=total,
        token_usage=used / total if total else 0.0,
        gen_throughput=coordinator.lanes.speculation.expected_tokens_per_s,
        cache_hit_rate=coordinator.in_flight.cached_tokens / prompt_tokens if prompt_tokens else 0.0,
        utilization=running / coordinator.lanes.max_num_seqs,
        max_running_requests=coordinator.lanes.max_num_seqs,
    )
    now = datetime.now(UTC).isoformat(timespec="seconds")
    return smg.GetLoadsResponse(timestamp=now, version=version, dp_rank_count=1, loads=[core])
