"""Splits: `TracedModel` and `Plan` in, one `StageModule` for each stage out."""

from autovaruna.stage.assignment import Assignment, assign, carry_over
from autovaruna.stage.module import StageModule
from autovaruna.stage.split import Edge, Split, StagePart, split

__all__ = ["Assignment", "Edge", "Split", "StageModule", "StagePart", "assign", "carry_over", "split"]
