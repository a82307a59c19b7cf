"""DNS records in files, and a coordinator that follows them: `python -m lab.records` has the coordinator's options."""

import os
from collections.abc import Iterable
from pathlib import Path

from coordinator import server
from specpool.cli.processes import Service
from specpool.rpc import discovery
from specpool.rpc.security.channel import FOLLOWED

FOLDER = "LAB_RECORDS"
"""Environment variable: the folder of the records, one file for each name."""
RESOLVE_SECONDS = 0.5


class Records:
    """The hosts behind a name. They share a port."""

    def __init__(self, folder: Path, name: str, workers: list[Service]) -> None:
        self._file, self._hosts = folder / name, [_host_of(worker) for worker in workers]
        self.address = f"{FOLLOWED}{name}:{workers[0].address.rpartition(':')[2]}"
        """The name's address, for a coordinator."""
        self._write()

    def remove(self, worker: Service) -> None:
        """Remove a worker's record."""
        self._hosts.remove(_host_of(worker))
        self._write()

    def add(self, worker: Service) -> None:
        """Add a worker's record."""
        self._hosts.append(_host_of(worker))
        self._write()

    def _write(self) -> None:
        partial = self._file.with_suffix(".part")
        partial.write_text("\n".join(self._hosts))
        partial.rename(self._file)


def _host_of(worker: Service) -> str:
    return worker.address.rpartition(":")[0]


async def _resolve(host: str, port: int) -> Iterable[str]:
    return (Path(os.environ[FOLDER]) / host).read_text().split()


if __name__ == "__main__":
    discovery._resolve = _resolve
    discovery.RESOLVE_SECONDS = RESOLVE_SECONDS
    server.main()
