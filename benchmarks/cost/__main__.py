"""What one part of the service costs.

    python -m benchmarks.cost --of PART [options of the part]

coordinator: the coordinator and the wire, per round with free fake workers, and per choice of a group
metrics:     observing a round, a scrape, and rounds with and without metrics
tracing:     the coordinator's processor time with every request traced, and without
overlap:     two overlapping groups, against one worker at a time, with fakes as fast as two GPUs might be
round:       shares of the time of a real pair: models, wire, scheduling, idling
start:       time from `specpool up` to the first answer, and memory of the three processes
threads:     threads and spinning of the workers, by a demo for each choice

`--of PART --help` lists the options of a part. Every part ends in one line of JSON.
"""

from importlib import import_module

from benchmarks.report import parser_of

PARTS = ("coordinator", "metrics", "tracing", "overlap", "round", "start", "threads")


def main(arguments: list[str] | None = None) -> None:
    """Runs the part that the command line names."""
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
