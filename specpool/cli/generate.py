"""`specpool generate`: streams the answer to one prompt, or answers a file of prompts concurrently."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Iterable
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Self

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from pydantic import BeforeValidator, Field, model_validator
from pydantic_settings import CliPositionalArg
from rich.console import Console
from rich.progress import track

from specpool.cli.waiting import clean, waiting
from specpool.client import AsyncClient, GenerateOptions
from specpool.client.constraints import CONSTRAINTS
from specpool.client.prompts import PromptLine, read_prompt_file, read_standard_input, reason_of
from specpool.client.requests import CHAT_OPTIONS
from specpool.drafting.plans import DraftMethod
from specpool.errors import InvalidArgumentError, RequestError, SpecpoolError
from specpool.rpc.config.help import with_flags
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
from specpool.v1 import generation_pb2 as pb


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not JSON ({error})") from None


def _json_object(value: object) -> object:
    """Parse JSON text. A TOML file may have a table instead."""
    parsed = _parsed(value) if isinstance(value, str) else value
    if not isinstance(parsed, dict | None):
        raise ValueError("must be a JSON object")
    return parsed


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
    draft_method: DraftMethod | None = Field(None, description="model, ngram, or best of both; default: the server's")
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
        """Load the settings. Each `--choice` is one text: pydantic would split it at commas."""
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
        given = [f"--{name.replace('_', '-')}" for name in CONSTRAINTS if getattr(self, name, None) is not None]
        if len(given) > 1:
            raise ValueError(f"give only one of {', '.join(given)}")
        return self


def _split_choices(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Return the texts of `--choice`, and the other arguments."""
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
    """Raise ValueError for a repeated constraint; argparse would silently keep the last one."""
    flags = [argument.partition("=")[0] for argument in takewhile(lambda argument: argument != "--", arguments)]
    for flag in ("--json-schema", "--regex", "--grammar"):
        if flags.count(flag) > 1:
            raise ValueError(f"{flag}: give it only once")


def generate(settings: GenerateSettings) -> int:
    source = settings.prompts
    try:
        lines = _lines(settings)
        source = settings.json_schema or settings.grammar
        constraint = source.read_text(encoding="utf-8") if source is not None else None
        if constraint is not None and settings.json_schema is not None:
            _parsed(constraint)
    except (OSError, ValueError) as error:
        print(f"specpool generate: {source or 'standard input'}: {reason_of(error)}", file=sys.stderr)
        return 2
    return asyncio.run(_generate(settings, lines, constraint))


async def answers(
    client: AsyncClient, lines: list[PromptLine], concurrency: int, **options: Any
) -> AsyncIterator[pb.GenerateResponse | RequestError]:
    """Yield the response or error of each line, in order, with up to `concurrency` requests in flight."""
    slots = asyncio.Semaphore(concurrency)

    async def answer(line: PromptLine) -> pb.GenerateResponse | RequestError:
        async with slots:
            try:
                return await client.generate(line.prompt, **{**options, **line.options})
            except RequestError as error:
                return error

    tasks = [asyncio.create_task(answer(line)) for line in lines]
    try:
        for task in tasks:
            yield await task
    finally:
        for task in tasks:
            task.cancel()


async def sure_answers(
    client: AsyncClient, lines: list[PromptLine], concurrency: int, **options: Any
) -> AsyncIterator[pb.GenerateResponse]:
    """Yield the response of each line, in order; raise the first error."""
    async for response in answers(client, lines, concurrency, **options):
        if isinstance(response, RequestError):
            raise response
        yield response


def as_record(line: PromptLine, response: pb.GenerateResponse) -> dict[str, object]:
    """Build the object that `--json` prints for a prompt."""
    return {
        "id": line.id,
        "token_ids": list(response.token_ids),
        "text": response.text,
        "finish_reason": response.finish_reason,
        "seed": response.seed,
        "usage": _as_dict(response.usage),
        "timings": _as_dict(response.timings),
        "speculative_decoding": _as_dict(response.speculative_decoding),
    }


def _as_dict(message: Message) -> dict[str, Any]:
    return MessageToDict(message, preserving_proto_field_name=True, always_print_fields_with_no_presence=True)


def why_cut(response: pb.GenerateResponse, max_tokens: int | None) -> str | None:
    """Return why the answer is incomplete; None if it is complete. `max_tokens`: the request's."""
    tokens = f"after {response.usage.completion_tokens} tokens"
    if response.finish_reason == "length":
        return f"stopped {tokens}: {'the limit of the server without ' if max_tokens is None else ''}--max-tokens"
    return f"aborted {tokens}" if response.finish_reason == "abort" else None


def _lines(settings: GenerateSettings) -> list[PromptLine]:
    if settings.prompts is not None:
        lines = read_prompt_file(settings.prompts)
    else:
        text = settings.prompt if settings.prompt is not None else read_standard_input()
        lines = [PromptLine(0, [{"role": "user", "content": text}] if settings.chat else text)]
    return [_with_template_options(line, settings.chat_template_kwargs) for line in lines]


def _with_template_options(line: PromptLine, options: dict[str, Any] | None) -> PromptLine:
    """Apply the command's options of the chat template to a chat without options of its own."""
    if options is None or isinstance(line.prompt, str):
        return line
    return replace(line, options={"chat_template_kwargs": options, **line.options})


def _options(settings: GenerateSettings, constraint: str | None) -> dict[str, Any]:
    """Return the options of requests. `constraint`: contents of the file with the schema or grammar."""
    names = GenerateOptions.__annotations__.keys() & type(settings).model_fields.keys() - set(CHAT_OPTIONS)
    read = {name: constraint for name in ("json_schema", "grammar") if getattr(settings, name) is not None}
    stop = None if settings.stop is None else [settings.stop]
    return {name: getattr(settings, name) for name in (*names, "timeout_seconds")} | {"stop": stop} | read


def _with_file(error: SpecpoolError, settings: GenerateSettings) -> str:
    """Format an error with the names of flags, and with the file of a refused constraint."""
    files = {"sampling_params.json_schema": settings.json_schema, "sampling_params.grammar": settings.grammar}
    file = files.get(error.field) if isinstance(error, InvalidArgumentError) else None
    text = with_flags(GenerateSettings, str(error))
    return text if file is None else f"{file}: {text}"


async def _generate(settings: GenerateSettings, lines: list[PromptLine], constraint: str | None) -> int:
    options = _options(settings, constraint)
    async with AsyncClient(settings.address, settings.retry_seconds, **settings.security) as client:
        if settings.wait_seconds:
            try:
                with waiting("specpool generate", settings.address) as show:
                    await client.wait_ready(settings.wait_seconds, show)
            except SpecpoolError as error:
                print(f"specpool generate: {_with_file(error, settings)}", file=sys.stderr)
                return 1
        if settings.prompts is None and not settings.json_lines:
            return await _stream_one(client, settings, lines[0], options)
        return await _print_all(client, settings, lines, options)


async def _stream_one(
    client: AsyncClient, settings: GenerateSettings, line: PromptLine, options: dict[str, Any]
) -> int:
    reason: str | None = None
    try:
        async for message in client.stream(line.prompt, **{**options, **line.options}):
            print(message.chunk.text, end="", flush=True)
            reason = why_cut(message.complete, settings.max_tokens)
    except SpecpoolError as error:
        print(f"specpool generate: {_with_file(error, settings)}", file=sys.stderr)
        return 1
    print(flush=True)
    if reason is not None:
        print(f"[{reason}]", file=sys.stderr)
    return 0


async def _print_all(
    client: AsyncClient, settings: GenerateSettings, lines: list[PromptLine], options: dict[str, Any]
) -> int:
    failed = False
    console = Console(stderr=True)
    bar = track(lines, "generating", console=console, disable=len(lines) < 2 or not console.is_terminal, transient=True)
    responses = answers(client, lines, settings.concurrency, **options)
    for line in bar:
        response = await anext(responses)
        if isinstance(response, RequestError):
            failed = True
            print(f"specpool generate: {_name(line)}: {_with_file(response, settings)}", file=sys.stderr)
            if settings.json_lines:
                print(json.dumps({"id": line.id, "error": str(response)}), flush=True)
        elif settings.json_lines:
            print(json.dumps(as_record(line, response), ensure_ascii=False), flush=True)
        else:
            print(f"[{_name(line)}]\n{response.text.strip()}\n", flush=True)
            if (reason := why_cut(response, settings.max_tokens)) is not None:
                print(f"specpool generate: {_name(line)}: {reason}", file=sys.stderr)
    return int(failed)


def _name(line: PromptLine) -> str:
    return clean(line.id if isinstance(line.id, str) else json.dumps(line.id))
