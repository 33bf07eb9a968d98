"""Holds that pieces, run one after the other, are the model, bit for bit; what they need is known without them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from autovaruna.graph.call import describe
from autovaruna.graph.pieces.extract import Source, extract, reads
from autovaruna.graph.random import RandomStream, untouched_generator
from autovaruna.graph.trace import trace
from autovaruna.graph.traced import TracedModel
from tests.catalogue import CASES
from tests.graph.models import CPU, Function, Pieces, traced_function
from tests.profiler.models import traced_case

NAMES = [
    "one_operation", "chain", "embedding", "dropout", "batch_norm", "conv_net", "constant", "frozen", "lstm",
    "module_twice", "moving_average", "no_grad", "fork_join", "three_users", "skip", "tied", "tied_three_ways",
    "shared_input", "outputs_dict", "outputs_none", "two_losses", "keywords", "nested_inputs",
]  # fmt: skip
TIED = {"tied", "tied_three_ways", "module_twice"}


def prepared(name: str, has_dropout: bool) -> tuple[nn.Module, TracedModel, list[Tensor]]:
    """Returns a model of the catalogue, its trace for four samples, and a call of five."""
    case = CASES[name] if has_dropout else CASES[name].without_dropout()
    model = case.model()
    args, kwargs = case.batch(4, 0)
    call = describe(model, args, kwargs)[1]
    args, kwargs = case.batch(5, 1)
    return model, trace(model, call, CPU), describe(model, args, kwargs)[0]


@pytest.mark.parametrize("name", NAMES)
def test_any_cuts_give_the_same_bits(name: str) -> None:
    """One piece, two, three, and one a block: outputs, gradients and buffers are equal, dropout included."""
    model, traced, tensors = prepared(name, has_dropout=True)
    num_blocks = len(traced.graph.blocks)
    one = Pieces(model, traced, [0])
    outputs = one.run(tensors)
    for starts in ([0, num_blocks // 2], [0, num_blocks // 3, 2 * num_blocks // 3], range(num_blocks)):
        pieces = Pieces(model, traced, sorted(set(starts)))
        assert all(map(torch.equal, pieces.run(tensors), outputs)), starts
        assert pieces.gradients.keys() == one.gradients.keys()
        different = [key for key, value in one.gradients.items() if not torch.equal(pieces.gradients[key], value)]
        assert not different, (starts, different)
        assert all(torch.equal(pieces.buffers[key], value) for key, value in one.buffers.items())


@pytest.mark.parametrize("name", NAMES)
def test_one_piece_is_the_plain_model(name: str) -> None:
    """With dropout off a piece of all blocks gives the plain model's bits; sums over tied uses differ in order."""
    model, traced, tensors = prepared(name, has_dropout=False)
    pieces = Pieces(model, traced, [0])
    outputs = pieces.run(tensors)
    args, kwargs = traced.call.tree.unflatten(tensors)
    expected = [leaf for leaf in torch.utils._pytree.tree_leaves(model(*args, **kwargs)) if isinstance(leaf, Tensor)]
    assert all(map(torch.equal, outputs, expected))
    torch.autograd.backward([each for each in expected if each.requires_grad],
                            [torch.ones_like(each) for each in expected if each.requires_grad])  # fmt: skip
    for key, parameter in model.named_parameters():
        assert (parameter.grad is None) == (key not in pieces.gradients), key
        if parameter.grad is not None and name in TIED:
            torch.testing.assert_close(pieces.gradients[key], parameter.grad)
        elif parameter.grad is not None:
            assert torch.equal(pieces.gradients[key], parameter.grad), key
    assert all(torch.equal(pieces.buffers[key], buffer) for key, buffer in model.named_buffers())


def test_a_shape_that_depends_on_data_runs_in_pieces() -> None:
    """What a mask selects has as many numbers as the data say, in every piece and at every call."""

    def selected(self: nn.Module, x: Tensor) -> Tensor:
        out = self.first(x)
        return self.second(torch.tanh(out)).sum() * torch.masked_select(out, x > 0).sum()

    model = Function(selected, first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    traced = trace(model, describe(model, (torch.zeros(3, 4),), {})[1], CPU)
    for seed in range(3):
        x = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed))
        pieces = Pieces(model, traced, range(len(traced.graph.blocks)))
        assert torch.equal(pieces.run([x])[0], model(x))


def test_repeated_nodes_come_along_or_stay_outside() -> None:
    """A mask is made again in each piece; a bare piece is given it instead."""

    def masked(self: nn.Module, x: Tensor) -> Tensor:
        mask = torch.arange(4) < 2
        return self.second(torch.where(mask, self.first(x), 0.0)) * mask

    traced = traced_function(masked, torch.zeros(3, 4), first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    last = traced.graph.blocks[-1]
    assert {"mul"} <= set(last.nodes) and traced.repeated
    whole = extract(traced, last.nodes, [last.nodes[-1]])
    bare = extract(traced, last.nodes, [last.nodes[-1]], is_bare=True)
    assert len(bare.named(Source.VALUE)) == len(whole.named(Source.VALUE)) + 1


def test_a_tied_parameter_has_an_argument_for_each_block() -> None:
    """Each block that uses a parameter has its own gradient of it, so that sums have one order."""
    _, traced, _ = prepared("tied", has_dropout=True)
    nodes = {name for block in traced.graph.blocks for name in block.nodes}
    piece = extract(traced, nodes, [traced.outputs[0].node])
    blocks = [a.block for a in piece.arguments if a.source is Source.PARAMETER and a.name == "words.weight"]
    assert blocks == sorted(set(blocks)) and len(blocks) == 2


def test_random_numbers_depend_on_step_micro_batch_and_node_alone() -> None:
    """Equal coordinates draw equal numbers, any other differ, and the user's generator does not notice."""

    def drawn(seed: int, step: int, micro_batch: int, node: int) -> Tensor:
        return RandomStream(seed, step, micro_batch, CPU).draw(node, torch.rand, 8)

    before = torch.get_rng_state()
    with untouched_generator(CPU):
        first = drawn(1, 2, 3, 4)
        assert torch.equal(first, drawn(1, 2, 3, 4))
        others = [drawn(0, 2, 3, 4), drawn(1, 0, 3, 4), drawn(1, 2, 0, 4), drawn(1, 2, 3, 0), drawn(1, 3, 2, 4)]
    assert not any(torch.equal(first, other) for other in others)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", ["chain", "tied", "skip", "three_users", "shared_input", "constant", "bert", "t5"])
def test_reads_are_the_arguments_of_the_piece(name: str) -> None:
    _, graph, _ = traced_case(name, 3)
    half = len(graph.graph.blocks) // 2
    for blocks in (graph.graph.blocks[:half], graph.graph.blocks[half:]):
        nodes = [node for block in blocks for node in block.nodes]
        made = {block.index for block in blocks}
        outputs = [value.name for value in graph.graph.values if value.producer in made]
        piece = extract(graph, nodes, outputs)
        assert reads(graph, nodes, outputs) == (piece.named(Source.VALUE), piece.named(Source.INPUT))
