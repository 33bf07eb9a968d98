"""Plans: the first call of a model is agreed on by all ranks, traced, measured, planned and split."""
