"""Lets graphs be compiled when they are first called: torch.export compiles each of many versions of a graph."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import get_ident
from typing import Any

from torch import fx

from autovaruna._torch import PyTreeCodeGen


@contextmanager
def deferred_compilation() -> Iterator[None]:
    """Makes ``recompile`` wait for the first call of the graph, on this thread, while the context lasts."""
    compile_now, tracing = fx.GraphModule.recompile, get_ident()

    def forward(module: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        compile_now(module)
        return module.forward(*args, **kwargs)

    def recompile(module: fx.GraphModule) -> Any:
        if get_ident() != tracing:
            return compile_now(module)
        codegen = module.graph._codegen
        if isinstance(codegen, PyTreeCodeGen):
            module._in_spec, module._out_spec = codegen.pytree_info.in_spec, codegen.pytree_info.out_spec
        type(module).forward = forward
        return None

    fx.GraphModule.recompile = recompile  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        fx.GraphModule.recompile = compile_now  # type: ignore[method-assign]


def compile_regions(module: fx.GraphModule) -> None:
    """Compiles the graphs inside of a graph."""
    for region in module.modules():
        if isinstance(region, fx.GraphModule) and region is not module:
            region.recompile()
