"""CTC loss: samples are free, steps and classes are whole."""

from __future__ import annotations

from typing import Any

import torch

import spmd.ctc  # noqa: F401  (defines the operators named below)
from spmd.rules.base import Call, DimRule, Rule, Whole, rule

own = torch.ops.spmd


@rule(own.ctc_loss.default)
def _forward(call: Call) -> Rule:
    inputs: list[Any] = [[None, "n", None], ["n", None], ["n"], ["n"]]
    return DimRule(inputs, [["n"], ["n", None, None]])


@rule(own.ctc_loss_backward.default)
def _backward(call: Call) -> Rule:
    inputs: list[Any] = [["n"], [None, "n", None], ["n", None], ["n"], ["n"], ["n"]]
    return DimRule([*inputs, ["n", None, None]], [[None, "n", None]])


@rule(own.within.default)
def _within(call: Call) -> Rule:
    """A guard: every rank has to come to the same answer."""
    return Whole()
