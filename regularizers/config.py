"""Which regularizer, and how strongly: the part of a trial's configuration about the loss. No torch."""

from dataclasses import replace
from typing import Annotated, Self

from pydantic import ConfigDict, Field, FiniteFloat, field_validator
from pydantic.dataclasses import dataclass

from regularizers.table import Regularizer, get_regularizer


@dataclass(frozen=True, config=ConfigDict(extra="forbid", use_attribute_docstrings=True))
class Regularization:
    """A regularizer with its factors. Zero means zero: only `kappa=None` stands for the default."""

    regularizer: str = "none"
    """Name of a row of the table of regularizers."""
    kappa: Annotated[FiniteFloat, Field(ge=0)] | None = None
    """Factor of the regularizer's penalty; null takes the regularizer's default for so many layers."""
    alpha: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """Factor of activation regularization (AR), on the last layer's dropped output."""
    beta: Annotated[FiniteFloat, Field(ge=0)] = 0.0
    """Factor of temporal activation regularization (TAR), on the last layer's raw output."""
    eld_stop_gradient: bool = True
    """For `expectation_linear`: no gradient through the pass without dropout, as in the paper.

    The released code lets it flow.
    """

    @field_validator("regularizer")
    @classmethod
    def _known(cls, name: str) -> str:
        return get_regularizer(name).name

    @property
    def declaration(self) -> Regularizer:
        return get_regularizer(self.regularizer)

    @property
    def effective_kappa(self) -> float:
        return self.declaration.default_kappa if self.kappa is None else self.kappa

    def completed(self, layers: int) -> Self:
        """With kappa written out, for a model of so many layers."""
        kappa = self.declaration.kappa_for(layers) if self.kappa is None else self.kappa
        return replace(self, kappa=kappa)

    @property
    def second_pass_has_gradient(self) -> bool:
        """Whether gradient flows through the second pass, if there is one."""
        declaration = self.declaration
        return declaration.second_gradient or (
            declaration.second_pass != "none" and not self.eld_stop_gradient
        )
