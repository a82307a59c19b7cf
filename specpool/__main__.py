"""Entry point of `specpool`, which names missing packages instead of failing to import them."""

import os
import sys

from specpool.environment.process import silent_interrupts

STARTS_WORKERS = ("up", "demo", "plan", "distill")
"""Commands that load a model."""


def main(arguments: list[str] | None = None) -> None:
    command, *_ = (sys.argv[1:] if arguments is None else arguments) or ["--help"]
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when gRPC is imported: its lines may quote callers
    with silent_interrupts():
        from specpool.cli.usage import answer
        from specpool.environment.extras import missing_modules, require_extra

        if missing_modules("cli") and (status := answer(command)) is not None:
            sys.exit(status)
        require_extra(f"specpool {command}", "cli", "worker" if command in STARTS_WORKERS else "cli")
        from specpool.cli.main import main as run

    run(arguments)


if __name__ == "__main__":
    main()
