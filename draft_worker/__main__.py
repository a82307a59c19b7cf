"""Entry point of `specpool-draft-worker`, which names missing packages instead of failing to import them."""

from specpool.environment.process import start_server


def main() -> None:
    start_server("specpool-draft-worker", "worker", "draft_worker.server")


if __name__ == "__main__":
    main()
