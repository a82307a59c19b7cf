"""Entry point of `specpool-coordinator`, which names missing packages instead of failing to import them."""

from specpool.environment.process import start_server


def main() -> None:
    start_server("specpool-coordinator", "coordinator", "coordinator.server")


if __name__ == "__main__":
    main()
