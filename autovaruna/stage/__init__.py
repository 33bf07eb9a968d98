"""Splits: `TracedModel` and `Plan` in, one `StageModule` for each stage out."""
