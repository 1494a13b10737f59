"""Sharding rules of operators, one module per family."""

from spmd.rules import (  # noqa: F401  (importing a family registers its rules)
    attention,
    ctc,
    cuts,
    embedding,
    factory,
    indexing,
    joins,
    layers,
    linalg,
    listed,
    matmul,
    pointwise,
    pools,
    reduction,
    strided,
    views,
)
from spmd.rules.base import Call, Candidate, DimRule, Rule, Whole, find_rule

__all__ = ["Call", "Candidate", "DimRule", "Rule", "Whole", "find_rule"]
