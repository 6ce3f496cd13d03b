"""Pages for people: templates that escape whatever they show, and styles that browsers know as ours."""

import base64
from functools import cache
from hashlib import sha256
from importlib.resources import files
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from service.origins import NO_FRAMES


@cache
def environment() -> Environment:
    """Of all templates; whoever has filters for some of them adds these."""
    return Environment(
        loader=PackageLoader("service"), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )


def rendered(template: str, **values: Any) -> str:
    return environment().get_template(template).render(**values)


@cache
def style(name: str) -> str:
    return files("service").joinpath("templates", name).read_text(encoding="utf-8")


@cache
def policy_for(name: str) -> str:
    """What a page that has this style inside may do in a browser: show itself, and pictures inside it."""
    digest = base64.b64encode(sha256(style(name).encode()).digest()).decode()
    return f"default-src 'none'; img-src data:; style-src 'sha256-{digest}'; form-action 'none'; {NO_FRAMES}"
