"""Which version of this program is running."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache  # it is read from a file
def own_version() -> str:
    try:
        return version("fraternal")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0"
