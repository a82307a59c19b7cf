"""Scrapes a metrics port, like Prometheus or a router."""

import asyncio
from contextlib import closing
from dataclasses import dataclass
from unittest import mock

from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families
from serving import PATIENCE_SECONDS


@dataclass(frozen=True)
class Scrape:
    """Served metric families by name."""

    families: dict[str, Metric]

    @classmethod
    def of(cls, text: str) -> "Scrape":
        families = list(text_string_to_metric_families(text))
        assert len({family.name for family in families}) == len(families), "a family is served twice"
        return cls({family.name: family for family in families})

    def values(self, name: str) -> dict[tuple[tuple[str, str], ...], float]:
        """Return the values of a metric's samples by their distinguishing labels."""
        samples = [sample for family in self.families.values() for sample in family.samples if sample.name == name]
        shared = {"model_name", "engine"}
        return {
            tuple(sorted(label for label in sample.labels.items() if label[0] not in shared)): sample.value
            for sample in samples
        }

    def value(self, name: str, **labels: str) -> float:
        """Return the value of one sample. KeyError if there is none."""
        return self.values(name)[tuple(sorted(labels.items()))]

    def calls(self) -> dict[tuple[str, str, str], float]:
        """Return how many calls have ended, by service, method and status code."""
        counts = ((dict(labels), count) for labels, count in self.values("specpool:grpc_server_handled_total").items())
        return {(by["grpc_service"], by["grpc_method"], by["grpc_code"]): count for by, count in counts}


async def http(port: int, request: str | bytes) -> tuple[str, dict[str, str], str]:
    """Send a request; return status, headers and body of the answer."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        with closing(writer):
            writer.write(request.encode() if isinstance(request, str) else request)
            answer = (await reader.read()).decode()
    head, _, body = answer.partition("\r\n\r\n")
    status, *fields = head.split("\r\n")
    return status.partition(" ")[2], dict(field.split(": ", 1) for field in fields), body


async def scrape(port: int) -> Scrape:
    """Return the current metrics of a server in this process."""
    with mock.patch("specpool.rpc.observability.metrics_endpoint.CACHE_FACTOR", 0):
        status, fields, body = await http(port, "GET /metrics HTTP/1.1\r\nHost: here\r\n\r\n")
    assert status == "200 OK"
    assert int(fields["Content-Length"]) == len(body.encode())
    return Scrape.of(body)
