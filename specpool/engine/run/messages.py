"""Messages between rank 0 and another rank before they serve, as JSON."""

from pydantic import BaseModel

from specpool.engine.config.options import EngineOptions
from specpool.engine.numerics.tiles import Tiles
from specpool.engine.sharding.shares import Sums


class Order(BaseModel):
    """To a rank: what it has to load, and where it finds the others."""

    rank: int
    sums: Sums
    options: EngineOptions
    """Those of the whole engine, but with the device of this rank."""
    exact: bool
    store: str
    """A file, or host and port separated by a space."""


class Loaded(BaseModel):
    """From a rank that has loaded its share."""

    sums: dict[str, str]
    """Sums over the words of some weights, by name, as hexadecimal digits: for the fingerprint of all weights."""


class Report(BaseModel):
    """From a rank that has built its pass."""

    device: str
    forward_pass: str
    """Class of its pass; all ranks must have the same one."""
    tiles: Tiles | None
    """Shapes that make its products exact; None: no shapes do."""
    agrees: bool
    """Whether its compiled products, if there are any, give a row the same bits beside any others."""
    kv_limit: int
    """Bytes that its KV cache may take."""
    weight_bytes: int
    weight_kinds: dict[str, int]
    """Bytes of its weights by the kind in which they are kept."""
    activation_bytes: int


class Begin(BaseModel):
    """To a rank: begin to serve."""

    columns: int
    """Columns of the KV cache."""
    tiles: Tiles


class Probed(BaseModel):
    """From a rank: the operations that gave equal rows different bits."""

    unequal: list[str]
