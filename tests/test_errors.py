"""Holds the tree of errors against its drawing."""

import inspect
import re

import pytest

from autovaruna import errors


def classes():
    return {name: each for name, each in vars(errors).items() if inspect.isclass(each)}


def drawn():
    """Returns, for each error in the drawing, the other bases it is drawn with."""
    lines = re.findall(r"[├└]── (\w+)(?: \(also (\w+)\))?", errors.__doc__)
    return {name: {base} - {""} for name, base in lines}


def test_the_drawing_has_every_error():
    assert set(drawn()) | {"AutoVarunaError"} == set(classes())


@pytest.mark.parametrize("name", sorted(drawn()))
def test_an_error_has_the_bases_it_is_drawn_with(name):
    bases = [base.__name__ for base in classes()[name].__bases__]
    assert bases[0] == "AutoVarunaError" and set(bases[1:]) == drawn()[name]
    with pytest.raises(errors.AutoVarunaError, match="why"):
        raise classes()[name]("why")
