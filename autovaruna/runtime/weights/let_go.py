"""Lets go of the numbers of a parameter, in place: whoever holds the parameter sees that they are elsewhere."""

from __future__ import annotations

from torch import Tensor, nn

from autovaruna._torch import swap_tensors
from autovaruna.runtime.weights.elsewhere import Elsewhere, Home, elsewhere


def let_go(parameter: nn.Parameter, home: Home) -> Tensor:
    """Returns the parameter, which is `Elsewhere` now and has no numbers and no gradient here.

    Lists that a script has made of parameters before, and optimizers, then hold what the model holds. Where PyTorch
    itself keeps the parameter, in the graph of a backward that may still come, a stand-in of its own is returned.
    """
    made = elsewhere(parameter, home)
    try:
        swap_tensors(parameter, made)
        parameter.__class__ = Elsewhere  # type: ignore[assignment]
    except RuntimeError:  # PyTorch keeps it
        return made
    except TypeError:  # a class of its own with another layout
        swap_tensors(parameter, made)
        return made
    parameter.__dict__.update(home=home, _is_param=True)
    return parameter
