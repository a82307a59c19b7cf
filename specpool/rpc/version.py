"""The version of this package."""

from functools import cache
from importlib.metadata import version


@cache  # the lookup reads package metadata from disk
def package_version() -> str:
    """Return the installed version of Specpool. Raises PackageNotFoundError if it is not installed."""
    return version("specpool")
