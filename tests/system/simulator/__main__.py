"""`python -m simulator`: simulates seeds, and shrinks the scenario of the first seed that fails.

The exit status is 1 if a seed fails.
"""

import argparse
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import nullcontext

from simulator.planted import BUGS
from simulator.scenario import draw
from simulator.setup import Scenario
from simulator.shrinking import shrink
from simulator.simulation import Result, simulate, simulate_all


def main() -> None:
    """Parse the options, simulate, and exit."""
    parser = argparse.ArgumentParser("python -m simulator", description="Simulate faults, deterministically.")
    parser.add_argument(
        "--seeds", default="0-99", type=seeds_of, metavar="A-B", help="such as 7, 0-99 or 3,8 (%(default)s)"
    )
    parser.add_argument("--plant", choices=[*BUGS], help="plant a bug in the code")
    parser.add_argument("--shrink-seconds", default=60.0, type=float, help="real time for shrinking (%(default)s)")
    options = parser.parse_args()
    with BUGS[options.plant]() if options.plant else nullcontext():
        sys.exit(_run(options.seeds, options.shrink_seconds))


def _run(seeds: Iterable[int], shrink_seconds: float) -> int:
    began = time.perf_counter()
    totals, failed = simulate_all(map(draw, seeds))
    real_seconds = time.perf_counter() - began
    print(
        f"seeds {totals.number}, requests {totals.requests}, tokens {totals.tokens}, faults {totals.faults}, "
        f"messages {totals.messages}, virtual seconds {totals.virtual_seconds:.0f}, real seconds {real_seconds:.1f}, "
        f"faults/minute {60 * totals.faults / real_seconds:.0f}, digest {totals.digest}"
    )
    for name, counts in (("requests by end", totals.ends), ("audits by result", totals.audits)):
        print(f"{name}: " + ", ".join(f"{key} {count}" for key, count in counts.most_common()))
    if failed is None:
        return 0
    _explain(failed, totals, shrink_seconds)
    return 1


def _explain(scenario: Scenario, result: Result, shrink_seconds: float) -> None:
    """Print what a seed violates, and a small scenario that fails, too."""
    print(f"\nseed {scenario.seed} fails:")
    _print_indented(result.violations)
    smaller = shrink(scenario, lambda candidate: bool(simulate(candidate).violations), shrink_seconds)
    print(f"it still fails with {len(smaller.events)} of {len(scenario.events)} events:")
    _print_indented([smaller.pair, smaller.settings, *smaller.workers, *smaller.events])
    _print_indented(simulate(smaller).violations)
    print(f"to reproduce it: make simulate SEEDS={scenario.seed}")


def _print_indented(lines: Iterable[object]) -> None:
    for line in lines:
        print(f"    {line}")


def seeds_of(text: str) -> list[int]:
    """The seeds of a list of numbers and ranges."""
    return [seed for part in text.split(",") for seed in _range_of(part)]


def _range_of(part: str) -> Iterator[int]:
    first, _, last = part.partition("-")
    yield from range(int(first), int(last or first) + 1)


if __name__ == "__main__":
    main()
