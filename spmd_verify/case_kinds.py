"""Which class a case has: overrides may ask for one that changes batches and models."""

from __future__ import annotations

from collections.abc import Mapping

from spmd_verify.adversarial.case import AdversarialCase
from spmd_verify.cases.case import LoadedCase
from spmd_verify.exact.case import ExactCase


def kind_of(overrides: Mapping[str, str]) -> type[LoadedCase]:
    """Return the class of a case with these overrides."""
    if "exact" in overrides:
        return ExactCase
    return AdversarialCase if "inputs" in overrides else LoadedCase
