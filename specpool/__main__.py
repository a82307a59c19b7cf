"""Entry point of `specpool`, which names missing packages instead of failing to import them."""

import sys

from specpool.environment.process import quiet_broken_pipes, silent_interrupts

STARTS_WORKERS = ("up", "demo", "plan", "distill")
"""Commands that load a model."""


def main(arguments: list[str] | None = None) -> None:
    command, *_ = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    with silent_interrupts():
        from specpool.cli.usage import answer
        from specpool.environment.extras import missing_modules, require_extra

        if missing_modules("cli"):
            with quiet_broken_pipes():
                status = answer(command)
            if status is not None:
                sys.exit(status)
        require_extra(f"specpool {command}", "cli", "worker" if command in STARTS_WORKERS else "cli")
        from specpool.cli.main import main as run

    run(arguments)


if __name__ == "__main__":
    main()
