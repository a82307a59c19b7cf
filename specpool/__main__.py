"""Entry point of `specpool`, which names missing packages instead of failing to import them."""

import sys

from specpool.environment.extras import require_extra
from specpool.environment.interrupts import silent_interrupts

STARTS_WORKERS = ("up", "demo", "plan", "distill")
"""Commands that load a model."""


def main() -> None:
    command = sys.argv[1] if len(sys.argv) > 1 else ""
    program = f"specpool {command}" if command in (*STARTS_WORKERS, "generate", "top") else "specpool"
    with silent_interrupts():
        require_extra(program, "cli", "worker" if command in STARTS_WORKERS else "cli")
        from specpool.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
