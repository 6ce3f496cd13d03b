"""Where an error of the request's body is said to be, and what is said about it."""

from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import PydanticCustomError

from service.errors import Problem
from service.problems import problems_in, to_pointer


class Closed(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Circle(Closed):
    kind: Literal["circle"]
    radius: Annotated[float, Field(gt=0)]


class Square(Closed):
    kind: Literal["square"]
    side: float

    @model_validator(mode="after")
    def _not_unlucky(self) -> "Square":
        if self.side == 13:
            raise PydanticCustomError("unlucky", "13 brings bad luck", {"pointer": "/side/~0"})
        return self


@dataclass(config=ConfigDict(extra="forbid"))
class Ink:
    colour: str = "black"
    width: int = 1


class Drawing(Closed):
    ink: Ink = Ink()
    shapes: dict[str, list[Annotated[Circle | Square, Field(discriminator="kind")]]] = {}
    scale: bool | int | str = 1


def problems(body: Any) -> list[Problem]:
    adapter = TypeAdapter(Drawing)
    with pytest.raises(ValidationError) as caught:
        adapter.validate_python(body)
    errors: Any = caught.value.errors()
    return problems_in(errors, body, adapter.json_schema())


def problem(body: Any) -> Problem:
    (only,) = problems(body)
    return only


def resolve(pointer: str, body: Any) -> Any:
    """RFC 6901, section 4."""
    for part in pointer.split("/")[1:]:
        part = part.replace("~1", "/").replace("~0", "~")
        body = body[int(part)] if isinstance(body, list) else body[part]
    return body


def circles(*shapes: Any) -> dict[str, Any]:
    return {"shapes": {"a/b~c": list(shapes)}}


def test_the_name_of_a_union_member_is_no_part_of_the_pointer() -> None:
    found = problem(circles({"kind": "circle", "radius": 1}, {"kind": "circle", "radius": -2}))
    assert found.pointer == "/shapes/a~1b~0c/1/radius"
    assert found.message == "Input should be greater than 0; got -2"


def test_a_missing_field_is_pointed_to_although_it_is_not_there() -> None:
    found = problem(circles({"kind": "square"}))
    assert (found.pointer, found.message) == ("/shapes/a~1b~0c/0/side", "'side' is required here")


def test_an_unknown_field_is_pointed_to_and_the_known_ones_of_that_very_shape_are_named() -> None:
    found = problem(circles({"kind": "square", "side": 1, "radius": 1}))
    assert found.pointer == "/shapes/a~1b~0c/0/radius"
    assert found.message == "unknown field 'radius'; known here: kind, side"


def test_an_unknown_field_of_a_dataclass_is_treated_like_that_of_a_model() -> None:
    found = problem({"ink": {"color": "red"}})
    assert (found.pointer, found.message) == (
        "/ink/color",
        "unknown field 'color'; known here: colour, width",
    )


def test_an_unknown_field_at_the_top_names_the_known_ones() -> None:
    assert problem({"ikn": {}}).message == "unknown field 'ikn'; known here: ink, scale, shapes"


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ({"radius": 1}, "'kind' is required here; one of: circle, square"),
        ({"kind": "star"}, "'star' is none of: circle, square"),
    ],
)
def test_a_union_without_a_member_points_to_the_field_that_chooses_it(shape: Any, message: str) -> None:
    found = problem(circles(shape))
    assert (found.pointer, found.message) == ("/shapes/a~1b~0c/0/kind", message)


def test_a_pointer_in_an_errors_context_goes_on_from_the_value() -> None:
    found = problem(circles({"kind": "square", "side": 13}))
    assert (found.pointer, found.message) == ("/shapes/a~1b~0c/0/side/~0", "13 brings bad luck")


def test_a_value_that_fits_no_member_of_a_union_is_reported_once() -> None:
    found = problem({"scale": None})
    assert found.pointer == "/scale"
    assert found.message.count("; or: ") == 2
    assert found.message.endswith("; got null")


def test_a_body_that_is_no_object_is_pointed_to_as_a_whole() -> None:
    found = problem([1])
    assert (found.pointer, found.message) == ("", "Input should be a JSON object; got [1]")


def test_a_long_value_is_cut_in_the_message() -> None:
    assert len(problem({"scale": ["x" * 10_000]}).message) < 300


def test_every_error_of_a_body_is_reported() -> None:
    found = problems({"ink": {"width": "wide"}, **circles({"kind": "circle", "radius": 0}), "more": 1})
    assert [each.pointer for each in found] == ["/ink/width", "/shapes/a~1b~0c/0/radius", "/more"]


NAMES = st.sampled_from(
    ["ink", "shapes", "kind", "circle", "square", "radius", "side", "colour", "a/b", "~", ""]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(NAMES, JSON, max_size=4))
def test_whatever_the_body_a_pointer_leads_into_it_or_names_what_is_missing(body: dict[str, Any]) -> None:
    try:
        TypeAdapter(Drawing).validate_python(body)
    except ValidationError as error:
        errors: Any = error.errors()
        for found in problems_in(errors, body, Drawing.model_json_schema()):
            whole, _, last = found.pointer.rpartition("/")
            missing = found.code in {"missing", "union_tag_not_found", "unlucky"}
            resolve(whole if missing else found.pointer, body)
            assert not missing or last not in resolve(whole, body)


@given(st.lists(st.text(max_size=5), max_size=4))
def test_a_pointer_resolves_to_the_place_that_it_was_made_from(parts: list[str]) -> None:
    body: Any = "the place"
    for part in reversed(parts):
        body = {part: body}
    assert resolve(to_pointer(parts), body) == "the place"
