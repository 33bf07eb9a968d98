"""Training that goes on when hosts come and go."""

from autovaruna.elastic.sampler import ElasticSampler

__all__ = ["ElasticSampler"]
