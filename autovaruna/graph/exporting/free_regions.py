"""Takes regions (``torch.no_grad()``) apart in which no gradient could arise anyway: all of it follows from inputs.

torch.export makes one operation of a region. What it counts in the inputs can then be seen, and repeated in stages.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from operator import getitem
from typing import Any

from torch import fx

from autovaruna.graph.regions import REGION, inside


def open_free_regions(module: fx.GraphModule, parameters: Collection[str], have_gradients: Sequence[bool]) -> None:
    """Puts the operations of each such region in its place.

    Args:
        module: A graph of torch.export; changed.
        parameters: Names of the attributes that are parameters.
        have_gradients: Whether each input gets a gradient.
    """
    inputs = dict(zip(module.graph.find_nodes(op="placeholder"), have_gradients, strict=True))
    free: set[fx.Node] = {node for node, has_gradient in inputs.items() if not has_gradient}
    for node in list(module.graph.nodes):
        if node.target is REGION and free.issuperset(_tensors(node)):
            free |= _open(module, node)
        elif node.op == "get_attr":
            free |= set() if str(node.target) in parameters else {node}
        elif node.op == "call_function" and free.issuperset(node.all_input_nodes):
            free.add(node)


def _tensors(region: fx.Node) -> list[fx.Node]:
    """Returns what goes into a region, beside its graph."""
    return [argument for argument in region.args[2:] if isinstance(argument, fx.Node)]


def _open(module: fx.GraphModule, region: fx.Node) -> set[fx.Node]:
    """Puts the operations of a region in its place, and returns them; a region that holds attributes stays."""
    inner, given = inside(module, region)
    if inner.graph.find_nodes(op="get_attr"):
        return {region}
    copies = dict(given)
    with module.graph.inserting_before(region):
        results: Any = module.graph.graph_copy(inner.graph, copies)
    for user in list(region.users):
        assert user.target is getitem, "a region returns a tuple"
        user.replace_all_uses_with(results[user.args[1]])
        module.graph.erase_node(user)
    module.graph.erase_node(region)
    return {copy for node, copy in copies.items() if node not in given}
