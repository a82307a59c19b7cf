"""Answer under every schema of the JSON Schema Test Suite. Count schemas that compile and answers that are valid.

    pip download --no-deps --no-binary :all: jsonschema==4.25.1 && tar xzf jsonschema-4.25.1.tar.gz
    python -m benchmarks.schema_suite jsonschema-4.25.1/json/tests/draft2020-12 [--max-tokens 48] [--output FOLDER]

Each schema gets two requests, without and with speculation; the answers must be equal. Refused schemas are counted by
reason. jsonschema checks complete answers; those cut off by --max-tokens are not checked. Exit status 1: an answer was
invalid, or the answers differed. The last line printed is JSON.
"""

import argparse
import asyncio
import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report import console, finish, output_folder, parser_of, progress, show, whole
from benchmarks.structured.questions import is_valid
from specpool.cli.processes import ProcessFailedError
from specpool.cli.up import running
from specpool.cli.up_settings import UpSettings
from specpool.client import AsyncClient
from specpool.errors import InvalidArgumentError
from specpool.v1 import generation_pb2 as pb

PROMPT = [{"role": "user", "content": "Write some JSON."}]
CONCURRENCY = 8
REASONS_SHOWN = 8


def main() -> None:
    """Parse the command line and run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path, help="folder of the suite's JSON files")
    parser.add_argument("--max-tokens", type=whole(1, 4000), default=48)
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    try:
        schemas = read_schemas(options.folder)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"folder: {error!r}")
    try:
        answers = asyncio.run(serve(schemas, options))
    except ProcessFailedError as error:
        raise SystemExit(str(error)) from None
    report(schemas, answers, options)


def read_schemas(folder: Path) -> list[Any]:
    """The distinct schemas of all files."""
    groups = [group for file in sorted(folder.glob("*.json")) for group in json.loads(file.read_text(encoding="utf-8"))]
    schemas = {json.dumps(group["schema"], sort_keys=True): group["schema"] for group in groups}
    if not schemas:
        raise ValueError("no schemas")
    return list(schemas.values())


async def serve(schemas: Sequence[Any], options: argparse.Namespace) -> list[list[pb.GenerateResponse] | str]:
    """The plain and the speculative answer to each schema, or the reason for its refusal."""
    settings = UpSettings(port=0, log_level="error", drain_seconds=1, max_num_seqs=CONCURRENCY)
    console.print("starting the service")
    async with running(settings) as address, AsyncClient(address) as client:
        free = asyncio.Semaphore(CONCURRENCY)

        async def one(schema: Any) -> list[pb.GenerateResponse] | str:
            async with free:
                try:
                    return [
                        await client.generate(
                            PROMPT, json_schema=json.dumps(schema), max_tokens=options.max_tokens,
                            num_speculative_tokens=k,
                        )
                        for k in (0, None)
                    ]  # fmt: skip
                except InvalidArgumentError as error:
                    return str(error)

        tasks = [asyncio.create_task(one(schema)) for schema in schemas]
        return [await task for task in progress(tasks, "schemas")]


def report(
    schemas: Sequence[Any], answers: Sequence[list[pb.GenerateResponse] | str], options: argparse.Namespace
) -> None:
    """Print the result. SystemExit if an answer is wrong."""
    refused = Counter(reason_of(answer) for answer in answers if isinstance(answer, str))
    answered = [(schema, both) for schema, both in zip(schemas, answers, strict=True) if not isinstance(both, str)]
    ended = [(schema, plain) for schema, (plain, _) in answered if plain.finish_reason == "stop"]
    invalid = [(schema, plain.text) for schema, plain in ended if not is_valid(schema, plain.text)]
    different = [schema for schema, (plain, other) in answered if plain.token_ids != other.token_ids]
    row = {
        "schemas": len(schemas),
        "compiled": len(answered),
        "ended": len(ended),
        "valid": len(ended) - len(invalid),
        "equal": len(answered) - len(different),
    }
    show("JSON Schema Test Suite", [row])
    reasons = [{"refused": count, "reason": reason} for reason, count in refused.most_common(REASONS_SHOWN)]
    show("reasons for refusals", reasons)
    for schema, text in invalid:
        console.print(f"invalid: {text} under {json.dumps(schema)}", markup=False)
    finish("schema_suite", {**row, "max_tokens": options.max_tokens, "reasons": reasons}, options.output)
    if invalid or different:
        raise SystemExit("some answers are invalid, or differ with speculation")


def reason_of(message: str) -> str:
    """The reason of a refusal, without the names and numbers of the schema."""
    return re.sub(r'"[^"]*"|\d+', "...", message)[:100]


if __name__ == "__main__":
    main()
