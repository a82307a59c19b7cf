"""Entry point of `specpool-target-worker`, which names missing packages instead of failing to import them."""

from specpool.environment.process import start_server


def main() -> None:
    start_server("specpool-target-worker", "worker", "target_worker.server")


if __name__ == "__main__":
    main()
