"""Splits: `TracedModel` and `Plan` in, one `StageModule` for each stage out."""

from autovaruna.stage.module import StageModule
from autovaruna.stage.split import Assignment, Edge, Split, StagePart, assign, carry_over, split

__all__ = ["Assignment", "Edge", "Split", "StageModule", "StagePart", "assign", "carry_over", "split"]
