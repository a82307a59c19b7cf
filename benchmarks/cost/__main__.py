"""Measure the cost of one part of the service.

    python -m benchmarks.cost --of PART [options of the part]

coordinator: rounds of the coordinator with instant fake workers, and the choice of a group
metrics:     observations, scrapes, and rounds with and without metrics
tracing:     CPU time of the coordinator with and without traces
sampling:    choosing the tokens of a pass, with and without compiled code
draft:       drafts of the draft model, in one call of compiled code and step by step
overlap:     overlapping groups against alternating workers, with fakes at the speed of two GPUs
round:       time of a real pair in models, wire and scheduling, and idle time
start:       time from `specpool up` to the first answer, and memory of each process
threads:     threads of the workers, beside busy processes, by a demo for each choice

`--of PART --help` lists the options of a part. Every part ends in one line of JSON.
"""

from importlib import import_module

from benchmarks.report import parser_of

PARTS = ("coordinator", "metrics", "tracing", "sampling", "draft", "features", "overlap", "round", "start", "threads")


def main(arguments: list[str] | None = None) -> None:
    """Run the part that the command line names."""
    parser = parser_of(__doc__, prog="python -m benchmarks.cost", add_help=False)
    parser.add_argument("--of", choices=PARTS, metavar="PART", help="one of " + ", ".join(PARTS))
    known, others = parser.parse_known_args(arguments)
    if known.of is None:
        if not {"-h", "--help"} & set(others):
            parser.error("--of PART is required: " + ", ".join(PARTS))
        parser.print_help()
        return
    import_module(f"benchmarks.cost.{known.of}").main(others)


if __name__ == "__main__":
    main()
