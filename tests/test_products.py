"""Products with one matrix are what torch.mm makes of them, whichever way they are made."""

import pytest
import torch

from models import products
from models.products import product_with


@pytest.mark.parametrize("packs", [True, False])
@pytest.mark.parametrize("biased", [True, False])
@pytest.mark.parametrize("columns", [1, 7, 64])
def test_a_product_is_that_of_the_whole_matrix_for_any_number_of_rows(
    packs: bool, biased: bool, columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_packs", lambda matrix: packs)
    generator = torch.Generator().manual_seed(1)
    matrix_NK, bias_N = (torch.randn(*shape, generator=generator) for shape in ((33, columns), (33,)))
    product = product_with(matrix_NK, bias_N if biased else None)
    for rows in (1, 5, 128, 131):
        x_MK = torch.randn(rows, columns, generator=generator)
        expected = x_MK.double() @ matrix_NK.double().t() + (bias_N.double() if biased else 0)
        torch.testing.assert_close(product(x_MK).double(), expected, rtol=0, atol=1e-5)


def test_packing_is_left_to_what_it_is_made_for() -> None:
    single = torch.zeros(3, 3)
    assert not products._packs(single.double())
    assert not products._packs(single.to("meta"))
    if torch.backends.mkldnn.is_available() and hasattr(torch.ops.mkldnn, "_linear_pointwise"):
        assert products._packs(single)
