"""Entry point of `specpool-draft-worker`, which names missing packages instead of failing to import them."""

import os

from specpool.environment.extras import require_extra
from specpool.environment.interrupts import silent_interrupts


def main() -> None:
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")  # read when gRPC is imported: its lines may quote callers
    with silent_interrupts():  # until the server handles signals
        require_extra("specpool-draft-worker", "worker")
        from draft_worker.server import main as run

        run()


if __name__ == "__main__":
    main()
