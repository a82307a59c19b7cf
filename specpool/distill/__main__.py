"""Entry point of `specpool distill`, which checks the settings before it imports torch."""

from specpool.environment.process import run_command, silent_interrupts


def main() -> None:
    with silent_interrupts():
        from specpool.distill.settings import load_settings

    settings = load_settings()
    with silent_interrupts():
        from specpool.distill.main import distill

    distill(settings)


if __name__ == "__main__":
    run_command(main)
