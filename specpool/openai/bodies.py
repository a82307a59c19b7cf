"""Request bodies. Unlisted fields are refused by name."""

from typing import Annotated, Any, Literal, TypeAlias, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from specpool.openai.errors import UNSUPPORTED_PARAMETER, invalid

MAX_PROMPTS = 128
"""Maximum prompts of a completion request."""

INT32 = Field(ge=-(2**31), lt=2**31)
UINT32 = Field(ge=0, lt=2**32)
Int32: TypeAlias = Annotated[int, INT32]
Uint32: TypeAlias = Annotated[int, UINT32]
T = TypeVar("T")
Many: TypeAlias = Annotated[list[T], Field(fail_fast=True)]
"""A list whose validation stops at the first error, since it may have a million elements."""

# OpenAI fields that would change the answer but are not supported, with the reason.
UNSUPPORTED = {
    "audio": "audio is not supported",
    "best_of": "use n",
    "echo": "prompts are not returned",
    "function_call": "deprecated; use tool_choice",
    "functions": "deprecated; use tools",
    "moderation": "moderation is not supported",
    "suffix": "inserting text is not supported",
    "verbosity": "use a message or chat_template_kwargs",
    "web_search_options": "web search is not supported",
}


class Body(BaseModel):
    """A body, or an object in one."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, protected_namespaces=())


class TextPart(Body):
    type: Literal["text", "refusal"]
    text: str | None = None
    refusal: str | None = None


def _check_part(part: Any) -> Any:
    if isinstance(part, dict) and part.get("type") not in ("text", "refusal", None):
        raise ValueError(f"parts of type {str(part['type'])[:40]!r} are not supported; use text")
    return part


class FunctionCall(Body):
    name: str
    arguments: str = ""


class ToolCall(Body):
    id: str = ""
    type: Literal["function"] = "function"
    function: FunctionCall
    index: int | None = None


class Message(Body):
    """A message, including the fields of earlier answers that clients send back."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Many[Annotated[TextPart, BeforeValidator(_check_part)]] | None = None
    name: str | None = None
    tool_calls: Many[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    refusal: str | None = None
    # Fields of answers that this server never sets.
    annotations: Annotated[list[Any], Field(max_length=0)] | None = None
    audio: None = None
    function_call: None = None

    @model_validator(mode="after")
    def _check_content(self) -> "Message":
        if self.content is None and not self.tool_calls:
            raise ValueError("content: required unless the message has tool_calls")
        return self

    @property
    def text(self) -> str | None:
        """The content as one string."""
        if isinstance(self.content, list):
            return "\n".join(part.text or part.refusal or "" for part in self.content)
        return self.content


class JsonSchemaFormat(Body):
    name: str = ""
    description: str | None = None
    schema_: dict[str, Any] | bool = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _check_schema(self) -> "ResponseFormat":
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise ValueError("json_schema: required with type json_schema, and not allowed otherwise")
        return self


class StructuredOutputs(Body):
    """Constraints, as in vLLM's API."""

    json_: dict[str, Any] | bool | str | None = Field(None, alias="json")
    regex: str | None = None
    choice: Many[str] | None = None
    grammar: str | None = None
    json_object: Literal[True] | None = None
    structural_tag: dict[str, Any] | str | None = None

    @model_validator(mode="after")
    def _check_one(self) -> "StructuredOutputs":
        if len(self.model_fields_set) != 1 or not any(value is not None for _, value in self):
            names = sorted(field.alias or name for name, field in StructuredOutputs.model_fields.items())
            raise ValueError(f"must have exactly one of {', '.join(names)}")
        return self


class PredictedText(Body):
    type: Literal["text"]
    text: str


class Prediction(Body):
    type: Literal["content"]
    content: str | Many[Annotated[PredictedText, BeforeValidator(_check_part)]]

    @property
    def text(self) -> str:
        return self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)


class StreamOptions(Body):
    include_usage: bool = False
    include_obfuscation: bool = False
    """Ignored: it pads chunks of OpenAI's own service."""


def _texts(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class GenerationBody(Body):
    """Fields of chats and completions."""

    model: str
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Uint32 | None = None
    temperature: float | None = None
    top_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    n: Uint32 | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[Many[str], BeforeValidator(_texts)] | None = None
    response_format: ResponseFormat | None = None
    prediction: Prediction | None = None
    """OpenAI supports it for chats only."""
    # vLLM's extensions
    top_k: Int32 | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    min_tokens: Uint32 | None = None
    stop_token_ids: Many[Uint32] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    structured_outputs: StructuredOutputs | None = None
    priority: Int32 = 0
    cache_salt: str | None = None
    # Specpool's extensions
    json_whitespace: bool = False
    constraint_after_reasoning: bool | None = None
    max_thinking_tokens: Uint32 | None = None
    # Ignored
    user: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _check_supported(cls, values: dict[str, Any]) -> dict[str, Any]:
        for name in UNSUPPORTED.keys() & values.keys():
            if values[name] is not None and values[name] is not False:
                raise invalid(name, f"not supported: {UNSUPPORTED[name]}", UNSUPPORTED_PARAMETER)
        return {name: value for name, value in values.items() if name not in UNSUPPORTED}

    @model_validator(mode="after")
    def _check_stream_options(self) -> "GenerationBody":
        if self.stream_options is not None and not self.stream:
            raise invalid("stream_options", "needs stream: true")
        return self

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatBody(GenerationBody):
    """Body of `/v1/chat/completions`."""

    messages: Annotated[Many[Message], Field(min_length=1)]
    max_completion_tokens: Uint32 | None = None
    logprobs: bool | None = None
    top_logprobs: Int32 | None = None
    tools: Many[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    modalities: Many[Literal["text"]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    include_reasoning: bool = True
    # Ignored
    metadata: dict[str, Any] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_options: dict[str, Any] | None = None
    prompt_cache_retention: str | None = None


def _check_prompts(prompt: Any) -> Any:
    is_list = isinstance(prompt, list) and not (prompt and isinstance(prompt[0], int))
    if is_list and not 0 < len(prompt) <= MAX_PROMPTS:
        raise ValueError(f"has {len(prompt)} prompts: it must have from 1 to {MAX_PROMPTS}")
    return prompt


class CompletionBody(GenerationBody):
    """Body of `/v1/completions`."""

    prompt: Annotated[str | Many[str] | Many[Uint32] | Many[Many[Uint32]], BeforeValidator(_check_prompts)]
    logprobs: Int32 | None = None
