"""Measure the speed of constrained answers.

    python -m benchmarks.structured [--prompts FILE] [--concurrencies 1,8] [--repeats 3] [--output FOLDER]

Each line of the prompts is {"id", "messages", "json_schema"}. One service answers all prompts in turns: "plain" without
speculation; "default" with it; and "lookup" with prompt lookup instead of the draft model. The last two also verify
forced tokens. Ratios are taken within a repeat; the table shows medians. An answer is exact if it equals the first
plain answer, and valid if jsonschema accepts it; answers cut off by --max-tokens do not count as valid or invalid. With
--vllm, vLLM for the CPU then answers the same prompts, without speculation and with its own prompt lookup, in the
environment that SPECPOOL_VLLM_PYTHON names.

Exit status 1: an answer was not exact or not valid. The last line printed is JSON.
"""

import asyncio
from pathlib import Path

from benchmarks.report import finish, output_folder, parser_of, show, whole, wholes
from benchmarks.structured.peer import peer_rows
from benchmarks.structured.questions import PROMPTS, read_questions
from benchmarks.structured.service import serve
from specpool.cli.processes import ProcessFailedError


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--prompts", type=Path, default=PROMPTS, help="JSONL file; default: the benchmark's own")
    parser.add_argument("--concurrencies", type=wholes(1, 1000), default=[1, 8], metavar="1,8,...")
    parser.add_argument("--max-tokens", type=whole(1, 4000), default=160)
    parser.add_argument("--repeats", type=whole(1, 1000), default=3)
    parser.add_argument("--vllm", action="store_true", help="also measure vLLM")
    parser.add_argument("--output", type=output_folder, help="folder for the result")
    options = parser.parse_args()
    try:
        questions = read_questions(options.prompts)
    except (OSError, ValueError, KeyError, TypeError) as error:
        parser.error(f"--prompts: {error!r}")
    try:
        rows = asyncio.run(serve(questions, options))
        peer = peer_rows(questions, options) if options.vllm else []
    except (ProcessFailedError, OSError, RuntimeError) as error:
        raise SystemExit(str(error)) from None
    show("constrained answers", rows)
    show("vLLM", peer)
    result = {"max_tokens": options.max_tokens, "repeats": options.repeats, "rows": rows, "vllm": peer}
    finish("structured", result, options.output)
    if any(row["exact_match"] < 1 or row["valid"] < 1 for row in rows):
        raise SystemExit("some answers differ from plain decoding, or are invalid")


if __name__ == "__main__":
    main()
