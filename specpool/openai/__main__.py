"""Entry point of `specpool-openai`, which names missing packages instead of failing to import them."""

from specpool.environment.process import start_server


def main() -> None:
    start_server("specpool-openai", "http", "specpool.openai.server")


if __name__ == "__main__":
    main()
