"""Entry point of `specpool plan`."""

from specpool.environment.process import run_command, silent_interrupts


def main() -> None:
    with silent_interrupts():
        from specpool.planning.main import main as run

    run()


if __name__ == "__main__":
    run_command(main)
