"""Lists every model that the library is tested with, by name."""

from tests.catalogue.case import DEVICE, Batch, Case, batch_size
from tests.catalogue.hugging_face import HUGGING_FACE, MORE, REFUSED
from tests.catalogue.small import SMALL
from tests.catalogue.structure import CONTAINERS, FUNCTIONS, STRUCTURE

PLAIN = SMALL + STRUCTURE + FUNCTIONS
"""Models that need torch alone."""

CASES = {case.name: case for case in (*PLAIN, *CONTAINERS, *HUGGING_FACE, *MORE, *REFUSED)}
"""The whole catalogue by name."""

__all__ = ["CASES", "DEVICE", "HUGGING_FACE", "MORE", "PLAIN", "REFUSED", "Batch", "Case", "batch_size"]
