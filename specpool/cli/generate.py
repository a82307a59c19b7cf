"""`specpool generate`: streams the answer to one prompt, or answers a file of prompts concurrently."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from google.protobuf.json_format import MessageToDict
from google.protobuf.message import Message
from rich.console import Console
from rich.progress import track

from specpool.cli.generate_settings import GenerateSettings, parsed
from specpool.cli.waiting import clean, waiting
from specpool.client import AsyncClient, GenerateOptions
from specpool.client.prompts import PromptLine, read_prompt_file, read_standard_input, reason_of
from specpool.client.requests import CHAT_OPTIONS
from specpool.errors import InvalidArgumentError, RequestError, SpecpoolError
from specpool.rpc.config.help import with_flags
from specpool.v1 import generation_pb2 as pb

FILES = {
    "json_schema": "sampling_params.json_schema",
    "grammar": "sampling_params.grammar",
    "prediction": "speculative.prediction.text",
}
"""Request fields to read from files, by setting."""


def generate(settings: GenerateSettings) -> int:
    source: Path | str = settings.prompts or "standard input"
    texts: dict[str, str] = {}
    try:
        lines = _lines(settings)
        for name in FILES:
            if (path := getattr(settings, name)) is not None:
                source = path
                texts[name] = _text_of(path, keeps_line_ends=name == "prediction")
                if name == "json_schema":
                    parsed(texts[name])
    except (OSError, ValueError) as error:
        print(f"specpool generate: {source}: {reason_of(error)}", file=sys.stderr)
        return 2
    return asyncio.run(_generate(settings, lines, texts))


def _text_of(path: Path, keeps_line_ends: bool) -> str:
    """Read a non-empty UTF-8 file. Raises OSError, ValueError. `keeps_line_ends`: do not normalize line ends."""
    with path.open(encoding="utf-8", newline="" if keeps_line_ends else None) as file:
        text = file.read()
    if not text:
        raise ValueError("is empty")
    return text


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


def notes(response: pb.GenerateResponse, options: Mapping[str, Any]) -> list[str]:
    """Return notes on an answer: the tokens of its prediction, and why it is incomplete. `options`: of the request."""
    usage, notes = response.usage, list[str]()
    if options.get("prediction") is not None:
        accepted, rejected = usage.accepted_prediction_tokens, usage.rejected_prediction_tokens
        notes.append(f"prediction: {accepted} tokens accepted, {rejected} rejected")
    if response.finish_reason == "length":
        limit = "the limit of the server without " if options.get("max_tokens") is None else ""
        notes.append(f"stopped after {usage.completion_tokens} tokens: {limit}--max-tokens")
    elif response.finish_reason == "abort":
        notes.append(f"aborted after {usage.completion_tokens} tokens")
    return notes


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


def _options(settings: GenerateSettings, texts: dict[str, str]) -> dict[str, Any]:
    """Return the options of all requests. `texts`: file contents by setting."""
    names = GenerateOptions.__annotations__.keys() & type(settings).model_fields.keys() - set(CHAT_OPTIONS)
    stop = None if settings.stop is None else [settings.stop]
    return {name: getattr(settings, name) for name in (*names, "timeout_seconds")} | {"stop": stop} | texts


def _with_file(error: SpecpoolError, settings: GenerateSettings) -> str:
    """Format an error with flag names, and with the file of an invalid constraint or prediction."""
    files = {field: getattr(settings, name) for name, field in FILES.items()}
    file = files.get(error.field) if isinstance(error, InvalidArgumentError) else None
    text = with_flags(GenerateSettings, str(error))
    return text if file is None else f"{file}: {text}"


async def _generate(settings: GenerateSettings, lines: list[PromptLine], texts: dict[str, str]) -> int:
    options = _options(settings, texts)
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
    try:
        async for message in client.stream(line.prompt, **(options := {**options, **line.options})):
            print(message.chunk.text, end="", flush=True)
    except SpecpoolError as error:
        print(f"specpool generate: {_with_file(error, settings)}", file=sys.stderr)
        return 1
    print(flush=True)
    for note in notes(message.complete, options):
        print(f"[{note}]", file=sys.stderr)
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
            for note in notes(response, {**options, **line.options}):
                print(f"specpool generate: {_name(line)}: {note}", file=sys.stderr)
    return int(failed)


def _name(line: PromptLine) -> str:
    return clean(line.id if isinstance(line.id, str) else json.dumps(line.id))
