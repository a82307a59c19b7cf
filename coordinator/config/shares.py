"""Setting for the shares of named drafts."""

from math import nan
from typing import Annotated

from pydantic import AfterValidator, Field

from specpool.rpc.security.channel import split_addresses

ROUNDING = 1e-9


def read_shares(shares: str) -> dict[str, float]:
    """Parse comma-separated NAME=SHARE entries. Raises ValueError."""
    read: dict[str, float] = {}
    for entry in split_addresses(shares):
        name, _, number = (part.strip() for part in entry.rpartition("="))
        try:
            share = float(number)
        except ValueError:
            share = nan
        if not name or not 0 <= share <= 1:
            raise ValueError(f"{entry} is not NAME=SHARE with a share from 0 to 1")
        if name in read:
            raise ValueError(f"{name} is listed twice")
        read[name] = share
    if sum(read.values()) > 1 + ROUNDING:
        raise ValueError(f"shares add up to {sum(read.values()):g}; the maximum is 1")
    return read


def _check_shares(shares: str) -> str:
    if not read_shares(shares):
        raise ValueError("no share is given")
    return shares


Shares = Annotated[str, Field(min_length=1), AfterValidator(_check_shares)]
"""Comma-separated NAME=SHARE entries."""
