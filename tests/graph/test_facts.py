"""What is known of nodes: facts, sizes, arithmetic, operators, constant numbers, and what is dropped as idle."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autovaruna.errors import TraceError
from autovaruna.evidence.verify import EagerVsGraph, compare
from autovaruna.graph.call import describe
from autovaruna.graph.operators import Merge, rows
from tests.catalogue import CASES
from tests.catalogue.small import Written
from tests.graph.models import CPU, named, traced, traced_function

X = torch.zeros(3, 4)
aten = torch.ops.aten
POSITIVE = torch.rand(3, 4) + 0.5
PLAIN = {name: row for name, row in rows().items() if not {"*", "?", "."} & set(name)}
PADDED = torch.linspace(-1, 1, 4 * 6 * 8).reshape(4, 6, 8).sin()
PADDING = torch.arange(6) >= torch.tensor([[6], [4], [3], [5]])
WIDE = torch.zeros(3, 12)
DRAWN = torch.randn(6, 8)


def filled(self: nn.Module, x: Tensor) -> Tensor:
    out, other = torch.zeros_like(x), torch.ones_like(x)
    out[:, :2] = self.layer(x)[:, :2]
    other[:, :2] = x[:, :2]
    return out.exp() + other.exp()


def test_memory_without_a_gradient_gets_one_by_what_is_written_into_a_view_of_it() -> None:
    model = traced_function(filled, X, layer=nn.Linear(4, 4))
    assert [model.facts[named(model, start)].needs_gradient for start in ("zeros", "ones")] == [True, False]


def test_changes_are_seen_by_what_the_schema_says() -> None:
    """Operations on lists, and those of libraries, change what they say, also in a region and through a view."""

    def changed(self: nn.Module, x: Tensor) -> Tensor:
        torch._foreach_mul_([self.plain], 0.9)
        with torch.no_grad():
            torch._foreach_lerp_([self.inside.view(2, 2)], [self.kept.view(2, 2)], 0.5)
        return x + self.plain + self.inside

    buffers = {name: torch.ones(4) for name in ("plain", "inside", "kept")}
    model = traced_function(changed, X, **buffers)
    assert model.changed_state == {"plain", "inside"}


def shaped(self: nn.Module, x: Tensor) -> Tensor:
    """Makes values whose sizes depend on the batch in several ways."""
    out = self.layer(x)
    table = torch.arange(6, device=x.device).float()
    pairs = torch.cat((out, out)).reshape(2, x.shape[0], 4)
    words = x.long()
    padded = torch.cat((words, words.new_zeros(2, 4)))
    return pairs.sum() + padded.sum() + table.sum()


@pytest.mark.parametrize("batch_size", [1, 2, 3, 7, 64])
def test_shapes_are_those_of_the_run(batch_size: int) -> None:
    """Every value of the graph has, for any batch size, the shape and bytes that a run of that size makes."""
    model = Written(shaped, layer=nn.Linear(4, 4))
    found = traced(model, X)
    seen: dict[str, Tensor] = {}

    class Watch(torch.fx.Interpreter):
        def run_node(self, n: torch.fx.Node) -> object:
            value = super().run_node(n)
            if isinstance(value, Tensor):
                seen[n.name] = value
            return value

        def fetch_attr(self, target: str) -> object:
            return model.get_parameter(target)

    Watch(found.module).run(torch.zeros(batch_size, 4), enable_io_processing=False)
    for name, value in seen.items():
        fake = found.nodes[name].meta.get("val")
        if isinstance(fake, Tensor):
            assert found.sizes.shape(fake, batch_size) == value.shape, name
            assert found.sizes.num_bytes(fake).at(batch_size) == value.numel() * value.element_size(), name


def test_operators_that_are_listed_are_there_and_merge_as_they_say() -> None:
    """Totals that are added are sums; extremes are those of the parts' extremes."""
    assert not [name for name in PLAIN if not hasattr(aten, name)]
    for name in (name for name, row in PLAIN.items() if row.merge not in (None, Merge.MEAN)):
        operator = getattr(aten, name)
        whole, parts = operator(POSITIVE), torch.stack([operator(row) for row in POSITIVE])
        if PLAIN[name].merge is Merge.SUM:
            assert torch.allclose(whole.float(), parts.sum().float()), name
        else:
            assert torch.equal(whole, operator(parts)), name


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize(
    ("norm", "padding", "trains"),
    [(None, PADDING, False), (nn.LayerNorm(8), PADDING, False), (None, PADDING.flip(1), False), (None, PADDING, True)],
    ids=["at the ends", "normalised", "elsewhere", "in training"],
)
def test_padded_places_are_those_of_plain_pytorch(norm: nn.Module | None, padding: Tensor, trains: bool) -> None:
    """Once, they held what nobody had computed: plain PyTorch leaves padding out, and fills it with zeros."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, norm=norm)
    model = Written(lambda self, x, padding: self.encoder(x, src_key_padding_mask=padding), encoder=encoder)
    model.train(trains)
    with torch.set_grad_enabled(trains):
        both = EagerVsGraph(traced(model, PADDED, padding), model, [PADDED, padding], CPU)
        (ours, *_), (plain, *_) = both.traced_graph(), both.plain()
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)


def by_positions(self: nn.Module, x: Tensor) -> Tensor:
    """Branches as libraries do that look for packed sequences."""
    positions = torch.arange(x.shape[1]).unsqueeze(0).expand(x.shape[0], -1)
    is_packed = isinstance(positions, torch._subclasses.FakeTensor) or not bool((positions.diff(dim=1) == 1).all())
    return torch.sin(x) if is_packed else torch.cos(x)


def test_a_branch_on_positions_is_that_of_plain_pytorch() -> None:
    assert named(traced_function(by_positions, WIDE), "cos")


def after_writing(x: Tensor) -> Tensor:
    positions = torch.arange(x.shape[1])
    positions[1:].add_(1)
    return positions.sum() == 66


UNKNOWN = {
    "input": lambda x: x.sum() == 0,
    "written into a view": after_writing,
    "drawn": lambda x: torch.rand(12).sum() > 0,
    "differs by batch size": lambda x: torch.ones(x.shape[0]).sum() == 7,
}


@pytest.mark.parametrize("kind", UNKNOWN)
def test_other_numbers_still_stop_a_trace(kind: str) -> None:
    with pytest.raises(TraceError, match=r"cannot be traced|fixes its batch size"):
        traced_function(lambda self, x: torch.sin(x) if UNKNOWN[kind](x) else torch.cos(x), WIDE)


def test_a_library_makes_no_other_mask_for_a_trace() -> None:
    """Once, PaliGemma without ``token_type_ids`` was traced with a mask that plain PyTorch does not make."""
    pytest.importorskip("transformers")
    case = CASES["paligemma"]
    model, (_, batch) = case.model(), case.batch(4, 0)
    trace = traced(model, **batch)
    compare(trace, model, describe(model, (), batch)[0], CPU)
    assert not [name for name in trace.nodes if name.startswith("cumsum") and trace.nodes[name].users]


def test_a_model_of_nothing_else_computes_nothing() -> None:
    with pytest.raises(TraceError, match="computes nothing"):
        traced_function(lambda self, x: F.dropout(x.float(), 0.0), DRAWN)
