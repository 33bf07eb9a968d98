"""An encoder with a padding mask evaluates as in plain PyTorch, at padded places, too."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autovaruna.graph.verify.eager_vs_graph import EagerVsGraph
from tests.graph.models import CPU, Function, traced

X = torch.linspace(-1, 1, 4 * 6 * 8).reshape(4, 6, 8).sin()
PADDING = torch.arange(6) >= torch.tensor([[6], [4], [3], [5]])


def encoded(self: nn.Module, x: Tensor, padding: Tensor) -> Tensor:
    out: Tensor = self.encoder(x, src_key_padding_mask=padding)  # type: ignore[operator]
    return out


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("norm", [None, nn.LayerNorm(8)])
@pytest.mark.parametrize("padding", [PADDING, PADDING.flip(1)], ids=["at the ends", "elsewhere"])
@pytest.mark.parametrize("trains", [True, False])
def test_padded_places_are_those_of_plain_pytorch(norm: nn.Module | None, padding: Tensor, trains: bool) -> None:
    """Once, they held what nobody had computed: plain PyTorch leaves padding out, and fills it with zeros."""
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = Function(encoded, encoder=nn.TransformerEncoder(layer, 2, norm=norm)).train(trains)
    with torch.set_grad_enabled(trains):
        both = EagerVsGraph(traced(model, X, padding), model, [X, padding], CPU)
        (ours, *_), (plain, *_) = both.trace(), both.plain()
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
