"""Which version of this program is running."""

from importlib.metadata import PackageNotFoundError, version


def own_version() -> str:
    try:
        return version("fraternal")
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "0"
