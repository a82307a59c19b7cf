"""Rules of the connection guard, without sockets and with a clock of their own."""

import pytest

from specpool.rpc.server.connections import ConnectionLimits
from specpool.rpc.server.guard import FIRST_CALL_SECONDS, Connection, ConnectionGuard
from specpool.rpc.server.sockets import Endpoint, endpoint_of, network_of


class Guarded:
    """A guard, and connections to it."""

    def __init__(self, clients: int, newcomers: int) -> None:
        self.now = 0.0
        self.guard = ConnectionGuard(ConnectionLimits(clients, newcomers), lambda: self.now)
        self.opened: dict[str, Connection] = {}

    def open(self, host: str, number: int, client: str = "") -> Connection:
        """Open a connection a millisecond after the last one."""
        self.now += 0.001
        endpoint: Endpoint = (host, 1000 + number)
        connection = self.opened[f"{client or host} {number}"] = self.guard.connection(endpoint)
        connection.client = client
        return connection

    def judged(self, after_seconds: float = 0.0) -> set[str]:
        """Return the connections that must end, and forget them."""
        self.now += after_seconds
        self.guard.judge(0.0)
        ended = {name for name, connection in self.opened.items() if connection.ending}
        for name in ended:
            self.opened.pop(name).seen_at = -1.0
        self.guard.judge(0.0)
        return ended


def test_oldest_stranger_of_the_largest_network_ends_first() -> None:
    guarded = Guarded(clients=100, newcomers=40)  # 10 strangers, 5 of a network
    for number in range(8):
        guarded.open("10.0.0.1", number)
    for number in range(3):
        guarded.open("10.0.0.2", number)
        guarded.open("10.0.0.3", 0, client="token:alice")
    assert guarded.judged() == set(), "newcomers have time while there is room"
    assert guarded.judged(after_seconds=2) == {f"10.0.0.1 {number}" for number in range(3)}
    strangers = {name for name in guarded.opened if "token" not in name}
    assert guarded.judged(after_seconds=FIRST_CALL_SECONDS) == strangers


def test_newcomers_find_room_when_strangers_fill_it() -> None:
    guarded = Guarded(clients=100, newcomers=40)
    for number in range(39):
        guarded.open("10.0.0.1", number)
    guarded.open("10.0.0.2", 0)
    ended = guarded.judged()
    assert ended == {f"10.0.0.1 {number}" for number in range(20)}, "the oldest, at once"


def test_addresses_of_an_ipv6_network_count_together() -> None:
    guarded = Guarded(clients=100, newcomers=40)
    for number in range(8):
        guarded.open(f"2001:db8::{number:x}:1", number)
        guarded.open(f"10.0.0.{number}", number)
    assert {name.partition(":")[0] for name in guarded.judged(after_seconds=2)} == {"2001"}


def test_client_with_most_connections_loses_its_idle_ones() -> None:
    guarded = Guarded(clients=4, newcomers=40)
    for number in range(4):
        guarded.open("10.0.0.1", number, client="token:greedy")
    guarded.opened["token:greedy 0"].calls = 1
    guarded.opened["token:greedy 1"].idle_since = 5.0
    for number in range(2):
        guarded.open("10.0.0.1", number + 10, client="token:modest")
    assert guarded.judged() == {"token:greedy 2", "token:greedy 3"}


def test_clients_without_idle_connections_lose_their_newest() -> None:
    guarded = Guarded(clients=2, newcomers=40)
    for number in range(3):
        guarded.open("10.0.0.1", number, client="token:busy").calls = 1
    assert guarded.judged() == {"token:busy 2"}


def test_health_checks_may_go_on_for_days() -> None:
    guarded = Guarded(clients=2, newcomers=40)
    balancer, flood = guarded.open("10.0.0.1", 0), guarded.open("10.0.0.2", 0)
    for connection, received in ((balancer, 24 * 3600 * 200), (flood, 2**31)):
        connection.has_answer, connection.received = True, received
    assert guarded.judged(after_seconds=24 * 3600) == {"10.0.0.2 0"}


def test_resets_of_long_calls_are_no_flood() -> None:
    """A thousand calls may reach their deadline together."""
    guarded = Guarded(clients=2, newcomers=40)
    connection = guarded.open("10.0.0.1", 0, client="token:patient")
    for seconds, ends in ((5.0, False), (0.0, True)):
        for _ in range(1000):
            with guarded.guard.call(connection) as reset:
                guarded.now += seconds
                reset()
        assert bool(connection.ending) is ends


@pytest.mark.parametrize(
    ("peer", "endpoint"),
    [
        ("ipv4:10.0.0.1:5000", ("10.0.0.1", 5000)),
        ("ipv6:%5B2001:db8::1%5D:5000", ("2001:db8::1", 5000)),
        ("ipv6:%5B::ffff:10.0.0.1%5D:5000", ("10.0.0.1", 5000)),
        ("ipv6:%5Bfe80::1%25eth0%5D:5000", ("fe80::1", 5000)),
        ("unix:/tmp/socket", None),
        ("", None),
    ],
)
def test_peers_are_read(peer: str, endpoint: Endpoint | None) -> None:
    assert endpoint_of(peer) == endpoint


def test_ipv6_networks_have_64_bits() -> None:
    assert network_of("2001:db8::1:2:3:4") == network_of("2001:db8::4") != network_of("2001:db8:1::4")
    assert network_of("10.0.0.1") == "10.0.0.1"
