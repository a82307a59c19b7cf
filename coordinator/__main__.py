"""Entry point of `specpool-coordinator`, which names missing packages instead of failing to import them."""

from specpool.environment.extras import require_extra


def main() -> None:
    require_extra("specpool-coordinator", "coordinator")
    from coordinator.server import main as run

    run()


if __name__ == "__main__":
    main()
