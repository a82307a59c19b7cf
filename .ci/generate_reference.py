"""Write `docs/reference.md`, the settings of every command: `python .ci/generate_reference.py [FILE]`."""

import sys
from collections.abc import Iterable
from pathlib import Path

from pydantic import BaseModel

from coordinator.config.settings import CoordinatorSettings
from draft_worker.server import DraftWorkerSettings
from specpool.cli.main import COMMANDS
from specpool.cli.up_settings import UpSettings
from specpool.distill.settings import DistillSettings
from specpool.engine.config.options import EngineOptions
from specpool.openai.settings import OpenAISettings
from specpool.planning.settings import PlanSettings
from specpool.rpc.config.help import options_of
from specpool.rpc.config.settings import ServerSettings, Settings
from specpool.rpc.security.settings import ClientSecurity
from specpool.worker.settings import WorkerSettings
from target_worker.server import TargetWorkerSettings

PAGE = Path(__file__).parents[1] / "docs/reference.md"
INTRODUCTION = """# Command reference

<!-- Written by `make reference` from the settings' own descriptions. Change those instead. -->

Every setting is a flag, an environment variable, or a key of a TOML file, in this order of precedence.
`--max-num-seqs 8`, `SPECPOOL_MAX_NUM_SEQS=8` and `max_num_seqs = 8` are the same. Settings without a value are
switches, such as `--smg` and `--no-smg`. Unknown settings are errors. Lists are separated by commas, and sizes have
units, such as `16GiB`.
"""
# Groups of settings that several commands share, and what they are called.
SHARED: dict[type[BaseModel], str] = {
    Settings: "Every command",
    ClientSecurity: "Commands that connect to a server",
    ServerSettings: "Every server",
    WorkerSettings: "Both workers",
    EngineOptions: "Both workers: the model",
}
PROGRAMS: dict[str, type[BaseModel]] = {
    "specpool-coordinator": CoordinatorSettings,
    "specpool-target-worker": TargetWorkerSettings,
    "specpool-draft-worker": DraftWorkerSettings,
    "specpool-openai": OpenAISettings,
    **{f"specpool {name}": settings for name, (settings, _) in COMMANDS.items()},
    "specpool plan": PlanSettings,
    "specpool distill": DistillSettings,
}


def page() -> str:
    """Return the page as Markdown."""
    sections = [INTRODUCTION]
    for group, title in SHARED.items():
        above = [other for other in SHARED if other is not group and issubclass(group, other)]
        sections.append(_section(title, group, above))
    for program, settings in PROGRAMS.items():
        groups = {**SHARED, UpSettings: "specpool up"} if program == "specpool demo" else SHARED
        shared = [group for group in groups if issubclass(settings, group)]
        names = ", ".join(f"[{_in_a_sentence(groups[group])}](#{_anchor(groups[group])})" for group in shared)
        summary = (settings.__doc__ or "").strip().splitlines()[0]
        sections.append(_section(f"`{program}`", settings, shared, f"{summary} Also has the settings of: {names}."))
    return "\n".join(sections)


def _section(title: str, settings: type[BaseModel], without: Iterable[type[BaseModel]], text: str = "") -> str:
    inherited = {option for group in without for option in options_of(group)}
    rows = [
        f"| {_code(option.flag or option.field.upper())} | {_code(option.metavar)} | {_code(option.default or '')} "
        f"| {option.description.replace('|', '/')} |"
        for option in options_of(settings)
        if option not in inherited
    ]
    table = ["| setting | value | default | meaning |", "|---|---|---|---|", *rows] if rows else []
    return "\n".join([f"## {title}", "", *([text, ""] if text else []), *table, *([""] if table else [])])


def _code(text: str) -> str:
    return f"`{text}`" if text else ""


def _in_a_sentence(title: str) -> str:
    return title[0].lower() + title[1:]


def _anchor(title: str) -> str:
    return title.lower().replace(" ", "-").replace(":", "")


if __name__ == "__main__":
    (Path(sys.argv[1]) if len(sys.argv) > 1 else PAGE).write_text(page())
