"""The version of this package."""

from functools import cache
from importlib.metadata import version


@cache  # it is looked up on disk, which takes milliseconds
def package_version() -> str:
    """The installed version of Specpool. PackageNotFoundError if only its sources are there."""
    return version("specpool")
