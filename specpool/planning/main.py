"""`specpool plan`: measures a pair for a minute, and predicts what it gains in any batch with any draft length."""

import json
import sys
from pathlib import Path

from rich.console import Console

from specpool.planning.plan import Plan, Terms, make_plan
from specpool.planning.report import as_json, show
from specpool.planning.running import described
from specpool.planning.settings import PROGRAM, PlanSettings
from specpool.planning.values import helm_values
from specpool.rpc.config.settings import naming
from specpool.rpc.observability.logs import configure_logging

WIDTH = 120


def main() -> None:
    """Entry point."""
    settings = PlanSettings.load(PROGRAM)
    configure_logging(settings.log_level)
    console = Console(stderr=True, width=None if sys.stderr.isatty() else WIDTH)
    if settings.output is not None and settings.values_file is None:
        with naming(PROGRAM, "output", OSError):
            settings.output.mkdir(parents=True, exist_ok=True)
    plan = planned(settings, console)
    show(plan, console)
    result = json.dumps(as_json(plan))
    with naming(PROGRAM, "output", OSError):
        if settings.values_file is not None:
            settings.values_file.write_text(helm_values(plan))
        elif settings.output is not None:
            keep(plan, result, settings.output)
    print(result)


def planned(settings: PlanSettings, console: Console) -> Plan:
    """A plan from running workers, or from models that are measured here."""
    if settings.target_address is not None:
        target, drafts = described(settings)
    else:
        from specpool.planning.models import measured  # loads torch, which running workers do without

        target, drafts = measured(settings, console)
    terms = Terms(
        batches=settings.batches,
        longest=settings.longest,
        exchange_seconds=settings.exchange_seconds,
        shared=settings.one_device,
        positions=settings.sequence_positions,
        throughput=settings.throughput,
    )
    return make_plan(target, drafts, terms)


def keep(plan: Plan, result: str, folder: Path) -> None:
    """Writes the result and a plot."""
    from specpool.planning.figure import plan_figure  # matplotlib comes with an extra of its own

    (folder / "plan.json").write_text(result + "\n")
    plan_figure(plan).savefig(folder / "plan.png", dpi=110)


if __name__ == "__main__":
    main()
