"""Finds the weights that autograd saves for a backward: those that are multiplied by what needs a gradient, too."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autovaruna.graph.batch.operators import SCALING, Means, name_of, operator_of
from autovaruna.graph.facts import Fact
from autovaruna.graph.precision import precision_of
from autovaruna.graph.versions import arguments

_LAYERS = frozenset(
    {
        *("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "convolution"),
        *("layer_norm", "group_norm", "batch_norm", "instance_norm", "rms_norm", "prelu", "bilinear"),
    }
)
_ADD_SELF = frozenset({"addmm", "baddbmm"})


def saved_weights(graph: fx.Graph, facts: Mapping[str, Fact], parameters: Mapping[str, str]) -> frozenset[str]:
    """Returns the first names of parameters whose numbers a backward needs, if the weights are trained.

    What autocast casts is saved as a copy, and does not count; nor do operations of which nobody knows.

    Args:
        graph: A traced graph.
        facts: What is known of each node.
        parameters: First name of each parameter, by each of its names.
    """
    found = set()
    weights: dict[fx.Node, str] = {}
    for node in graph.nodes:
        if node.op == "get_attr" and str(node.target) in parameters:
            weights[node] = parameters[str(node.target)]
        elif node.op == "call_function" and node.name in facts and facts[node.name].is_view:
            seen = [weights[each] for each in node.all_input_nodes if each in weights]
            if seen:
                weights[node] = seen[0]
        is_saved = name_of(node) in _LAYERS or operator_of(node).means in SCALING | {Means.PRODUCT}
        if is_saved and not precision_of(node):
            multiplied = [each for each in _multiplied(node) if each.name in facts and facts[each.name].needs_gradient]
            if len(multiplied) > 1:
                found |= {weights[each] for each in multiplied if each in weights}
    return frozenset(found)


def _multiplied(node: fx.Node) -> list[fx.Node]:
    """Returns the arguments of an operation but those that it adds."""
    is_sum = name_of(node) in _ADD_SELF
    given = arguments(node).items()
    return [
        each for name, each in given if isinstance(each, fx.Node) and name != "bias" and not (is_sum and name == "self")
    ]
