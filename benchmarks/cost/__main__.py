"""Measure the cost of one part of the service.

    python -m benchmarks.cost --of PART [options of the part]

coordinator: rounds of the coordinator with instant fake workers, and the choice of a group
round:       time of a real pair in models, wire and scheduling, and idle time
start:       time from `specpool up` to the first answer, and memory of each process

`--of PART --help` lists the options of a part. Every part ends in one line of JSON.
"""

from importlib import import_module

from benchmarks.report import parser_of

PARTS = ("coordinator", "round", "start")


def main(arguments: list[str] | None = None) -> None:
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
