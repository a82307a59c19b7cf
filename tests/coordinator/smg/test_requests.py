"""Conversion of the gateway's requests."""

from typing import Any

import pytest
from smg_grpc_proto import vllm_engine_pb2 as smg

from coordinator.smg.messages import generate_request
from specpool.protocol.errors import InvalidArgumentError
from specpool.v1 import generation_pb2 as pb


def params(**fields: Any) -> pb.SamplingParams:
    request = smg.GenerateRequest(tokenized=smg.TokenizedInput(), sampling_params=smg.SamplingParams(**fields))
    return generate_request(request).sampling_params


def test_set_fields_keep_their_values() -> None:
    same = {
        "temperature": 0.5, "top_p": 0.25, "top_k": 7, "min_p": 0.125, "repetition_penalty": 1.5,
        "frequency_penalty": -0.5, "presence_penalty": 0.5, "max_tokens": 9, "min_tokens": 2, "stop": ["a", "b"],
        "stop_token_ids": [3, 4], "ignore_eos": True, "seed": 5, "logprobs": 6, "logit_bias": {8: -1.5}, "n": 2,
    }  # fmt: skip
    assert params(**same) == pb.SamplingParams(**same)


def test_unset_fields_are_neutral_except_the_temperature() -> None:
    assert params() == pb.SamplingParams(temperature=1)
    unset = {"top_p": 0, "top_k": 0, "repetition_penalty": 0, "n": 0}
    assert params(**unset, skip_special_tokens=True, include_stop_str_in_output=True) == params()
    assert params(temperature=0) == pb.SamplingParams(temperature=0)


def test_numbers_of_other_ranges_are_mapped() -> None:
    assert params(seed=-1).seed == 2**64 - 1
    assert params(top_k=2**32 - 1).top_k == 2**31 - 1
    assert params(logprobs=-1).logprobs == -1  # validation rejects it


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("json_schema", "{}"),
        ("json_schema", ""),
        ("regex", "a"),
        ("grammar", "start: /a/"),
        ("structural_tag", "{}"),
        ("json_object", True),
        ("json_object", False),
    ],
)
def test_constraints_keep_their_names_and_texts(field: str, value: Any) -> None:
    converted = params(**{field: value}, grammar_from_first_token=True)
    assert converted == pb.SamplingParams(temperature=1, **{field: value})
    assert converted.WhichOneof("constraint") == field


def test_choices_are_converted() -> None:
    converted = params(choice=smg.ChoiceConstraint(choices=["a", "b"]))
    assert converted.choice == pb.ChoiceConstraint(choices=["a", "b"])
    assert params(choice=smg.ChoiceConstraint()).WhichOneof("constraint") == "choice"  # validation rejects it
    many = params(choice=smg.ChoiceConstraint(choices=map(str, range(2000))))
    assert len(many.choice.choices) == 1025


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt_logprobs", 0),
        ("truncate_prompt_tokens", 3),
        ("logit_bias", {-1: 1.0}),
    ],
)
def test_unsupported_parameters_are_rejected_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^sampling_params.{field}: "):
        params(**{field: value})


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_transfer_params", smg.KvTransferParams()),
        ("kv_transfer_params_json", ""),
        ("mm_inputs", smg.MultimodalInputs()),
        ("extra_mm_inputs", [smg.MultimodalInputs()]),
        ("media_refs", smg.MediaRefs()),
        ("data_parallel_rank", 0),
    ],
)
def test_unsupported_fields_are_rejected_by_name(field: str, value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match=f"^{field}: is not supported$"):
        generate_request(smg.GenerateRequest(text="a", **{field: value}))


def test_prompts() -> None:
    assert generate_request(smg.GenerateRequest(request_id="x", text="a")).text == "a"
    tokenized = smg.TokenizedInput(original_text="a", input_ids=[1, 2])
    assert generate_request(smg.GenerateRequest(tokenized=tokenized)).tokenized.input_ids == [1, 2]
    empty = generate_request(smg.GenerateRequest(tokenized=smg.TokenizedInput()))
    assert empty.WhichOneof("input") == "tokenized"  # validation rejects it as empty
    assert generate_request(smg.GenerateRequest()).WhichOneof("input") is None
