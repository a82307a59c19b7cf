"""Settings of `specpool generate`."""

import json
import sys
from collections.abc import Iterable
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import CliPositionalArg

from specpool.client.constraints import CONSTRAINTS
from specpool.drafting.plans import DraftMethod
from specpool.rpc.config.settings import (
    INT32_MAX,
    INT32_MIN,
    UINT32_MAX,
    UINT64_MAX,
    CoordinatorAddress,
    Seconds,
    Settings,
    naming,
)
from specpool.rpc.security.settings import ClientSecurity


def parsed(text: str) -> Any:
    """Parse JSON. Raises ValueError."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None


def _json_object(value: object) -> object:
    """Parse JSON text. A TOML file may have a table instead."""
    options = parsed(value) if isinstance(value, str) else value
    if not isinstance(options, dict | None):
        raise ValueError("must be a JSON object")
    return options


class GenerateSettings(Settings, ClientSecurity):
    """Generate text for a PROMPT, for each line of a JSONL file, or for standard input."""

    prompt: CliPositionalArg[str | None] = Field(None, description="text to continue; default: standard input")
    address: CoordinatorAddress = Field("127.0.0.1:50050", description="host:port of the coordinator")
    prompts: Path | None = Field(
        None, description='JSONL file of {"id", "prompt"} or {"id", "messages"}; - for standard input'
    )
    chat: bool = Field(False, description="send PROMPT as a user's chat message; not for files, which can have chats")
    chat_template_kwargs: Annotated[Any, BeforeValidator(_json_object)] = Field(
        None, description="options of the chat template as JSON, such as '{\"enable_thinking\": false}'"
    )
    max_tokens: int | None = Field(None, ge=1, le=UINT32_MAX, description="maximum tokens; default: the server's")
    num_speculative_tokens: int | None = Field(
        None, ge=0, le=UINT32_MAX, description="draft tokens per round; 0: plain decoding; default: the server's"
    )
    draft_method: DraftMethod | None = Field(
        None, description="model, ngram, suffix, prediction, or best, the most promising one; default: the server's"
    )
    prediction: Path | None = Field(
        None, description="file with a text that the answer probably repeats; --prompts can override it per line"
    )
    temperature: float | None = Field(None, description="0: greedy, the default; above 0: sample")
    top_p: float | None = Field(None, description="sample from the top tokens with this cumulative probability")
    top_k: int | None = Field(None, ge=INT32_MIN, le=INT32_MAX, description="sample from this many of the top tokens")
    min_p: float | None = Field(None, description="minimum probability to sample, relative to the top token's")
    repetition_penalty: float | None = Field(None, description="above 1: earlier tokens become less likely")
    frequency_penalty: float | None = Field(None, description="above 0: each occurrence makes a token less likely")
    presence_penalty: float | None = Field(None, description="above 0: generated tokens become less likely")
    json_schema: Path | None = Field(None, description="file with a JSON Schema of the answer")
    regex: str | None = Field(None, description="regular expression that the answer must match")
    grammar: Path | None = Field(None, description="file with a Lark or GBNF grammar of the answer")
    choice: list[str] | None = Field(None, description="allowed answer; repeat the flag for more")
    constraint_after_reasoning: bool | None = Field(None, description="apply the constraint after the reasoning")
    json_whitespace: bool | None = Field(None, description="allow optional whitespace in JSON")
    max_thinking_tokens: int | None = Field(None, ge=0, le=UINT32_MAX, description="maximum tokens of reasoning")
    skip_special_tokens: bool | None = Field(None, description="omit special tokens from the text; default: on")
    seed: int | None = Field(
        None, ge=0, le=UINT64_MAX, description="seed of sampling; default: a random one, shown by --json"
    )
    stop: str | None = Field(None, description="end the answer before this text")
    min_tokens: int | None = Field(None, ge=0, le=UINT32_MAX, description="minimum tokens to generate")
    ignore_eos: bool | None = Field(None, description="continue after the end-of-sequence token")
    concurrency: int = Field(8, ge=1, description="requests in flight")
    timeout_seconds: Seconds | None = Field(None, gt=0, description="deadline of each request")
    wait_seconds: Seconds = Field(
        60.0, ge=0, description="how long to wait for a server to start, besides its loading time; 0: not at all"
    )
    retry_seconds: Seconds = Field(0.0, ge=0, description="how long to retry requests while the server is unavailable")
    json_lines: bool = Field(False, alias="json", description="print one JSON object per prompt, in input order")

    @classmethod
    def load(cls, program: str, arguments: list[str] | None = None, other_settings: Iterable[str] = ()) -> Self:
        """Load the settings. Parse `--choice` separately, because pydantic splits values at commas."""
        choices, others = _split_choices(sys.argv[1:] if arguments is None else arguments)
        with naming(program, "", ValueError):
            _check_repeats(others)
        settings = super().load(program, [*(["--choice", "checked"] if choices else []), *others], other_settings)
        return settings.model_copy(update={"choice": choices}) if choices else settings

    @model_validator(mode="after")
    def _check_source(self) -> "GenerateSettings":
        if self.prompt is not None and self.prompts is not None:
            raise ValueError("give a prompt or a file of prompts, not both")
        if self.chat and self.prompts is not None:
            raise ValueError('--chat is for a prompt; a chat in a file has "messages" instead of "prompt"')
        if self.chat_template_kwargs is not None and not self.chat and self.prompts is None:
            raise ValueError("chat_template_kwargs needs --chat, or a file of prompts with chats")
        if self.draft_method is DraftMethod.PREDICTION and self.prediction is None and self.prompts is None:
            raise ValueError("--draft-method prediction needs --prediction")
        given = [f"--{name.replace('_', '-')}" for name in CONSTRAINTS if getattr(self, name, None) is not None]
        if len(given) > 1:
            raise ValueError(f"give only one of {', '.join(given)}")
        return self


def _split_choices(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Split command-line arguments into the texts of `--choice` and all other arguments."""
    choices, others, rest = list[str](), list[str](), iter(arguments)
    for argument in rest:
        flag, equals, text = argument.partition("=")
        if argument == "--":
            return choices, [*others, argument, *rest]
        if flag == "--choice" and (equals or (text := next(rest, ""))):
            choices.append(text)
        else:
            others.append(argument)
    return choices, others


def _check_repeats(arguments: list[str]) -> None:
    """Raise ValueError for a repeated constraint or prediction, because argparse silently keeps the last one."""
    flags = [argument.partition("=")[0] for argument in takewhile(lambda argument: argument != "--", arguments)]
    for flag in ("--json-schema", "--regex", "--grammar", "--prediction"):
        if flags.count(flag) > 1:
            raise ValueError(f"{flag}: give it only once")
