"""Measure what each attack costs a well-behaved client, beside a quiet time.

    make attacks
    make attacks ATTACKS="--seconds 10 --only '300 silent connections'"

Every service, the attacker and the well-behaved client are separate processes on loopback sockets. Exit status 1: an
answer was wrong, or a request of the well-behaved client failed. The last line printed is JSON.

To add an attack, write a coroutine with the decorator `attacks.attack.attack` in a module of this folder.
"""

import asyncio
import multiprocessing
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from attacks.attack import Attack, harm, load_attacks
from attacks.service import Service, Setup, started
from attacks.victim import Figures, Victim, median_and_p95

from benchmarks.report import finish, parser_of, progress, show
from specpool.healthcheck import seconds

# Time for an attack to begin, and for a service to warm up.
BEGIN_SECONDS, WARM_UP_SECONDS = 2.0, 2.0


async def measure_all(attacks: Iterable[Attack], seconds: float) -> list[dict[str, Any]]:
    """A row for each attack, and one without an attack for each service."""
    by_setup: dict[Setup, list[Attack]] = {}
    for attack in attacks:
        by_setup.setdefault(attack.setup, []).append(attack)
    work = [(setup, attack) for setup, group in by_setup.items() for attack in (None, *group)]
    rows, service_row = [], {}
    for setup, attack in progress(work, "attacks"):
        async with started(setup) as service:
            row = await _measure(service, setup, attack, seconds)
        if attack is None:
            service_row = row
        for column in ("median", "p95", "new_median", "new_p95"):
            row[f"{column}_ratio"] = round(row[f"{column}_ms"] / service_row[f"{column}_ms"], 2)
        rows.append(row)
    return rows


async def _measure(service: Service, setup: Setup, attack: Attack | None, seconds: float) -> dict[str, Any]:
    """The figures of the well-behaved client under an attack, on a service that nobody else uses."""
    victim = Victim(service, setup.victims)
    await victim.measure(WARM_UP_SECONDS)
    if attack is None:
        return _row(setup, "none", await victim.measure(seconds))
    attacker = multiprocessing.get_context("spawn").Process(target=harm, args=(attack.name, service), daemon=True)
    attacker.start()
    try:
        await asyncio.sleep(BEGIN_SECONDS)
        row = _row(setup, attack.name, await victim.measure(seconds))
        if attacker.exitcode is not None:
            raise SystemExit(f"{attack.name}: the attacker ended by itself")
    finally:
        attacker.kill()
    return row


def _row(setup: Setup, name: str, figures: Figures) -> dict[str, Any]:
    median, p95 = median_and_p95(figures.seconds)
    new_median, new_p95 = median_and_p95(figures.newcomer_seconds)
    return {
        "attack": name,
        "service": " ".join([setup.kind, *setup.flags, *setup.worker_flags]),
        "requests": len(figures.seconds) + len(figures.newcomer_seconds),
        "median_ms": median,
        "p95_ms": p95,
        "new_median_ms": new_median,
        "new_p95_ms": new_p95,
        "wrong": figures.wrong,
        "failed": figures.failed,
        "growth_mib": round(figures.growth / 2**20, 1),
        "log_kib": round(figures.logged / 2**10, 1),
    }


def main() -> None:
    """Parse the command line, run the attacks, and print the figures."""
    attacks = load_attacks()
    parser = parser_of(__doc__, prog="make attacks")
    parser.add_argument("--seconds", type=seconds, default=10.0, help="duration of a measurement")
    parser.add_argument("--only", nargs="+", choices=attacks, metavar="ATTACK", help="some attacks; default: all")
    parser.add_argument("--list", action="store_true", help="print the names of all attacks")
    parser.add_argument("--output", type=Path, help="folder for the results")
    options = parser.parse_args()
    if options.list:
        print(*attacks, sep="\n")
        return
    rows = asyncio.run(measure_all([attacks[name] for name in options.only or attacks], options.seconds))
    columns = ("attack", "median_ms", "p95_ms", "new_p95_ms", "median_ratio", "p95_ratio", "wrong", "failed")
    show("a well-behaved client under attack", [{name: row[name] for name in columns} for row in rows])
    finish("attacks", {"seconds": options.seconds, "rows": rows}, options.output)
    raise SystemExit(any(row["wrong"] or row["failed"] for row in rows))


if __name__ == "__main__":
    main()
