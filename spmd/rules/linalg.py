"""Linear algebra on stacks of matrices: the stack's dims are free, the matrices are whole."""

from __future__ import annotations

from typing import Any

import torch

from spmd.rules.base import Call, DimRule, Label, Rule, rule

aten = torch.ops.aten


def _stacked(ndim: int, batch: int) -> list[Label | None]:
    return [*range(batch), *([None] * (ndim - batch))]


@rule(
    aten.linalg_inv_ex, aten.linalg_cholesky_ex, aten.cholesky_inverse, aten.linalg_qr,
    aten._linalg_svd, aten._linalg_eigh, aten.linalg_eig, aten.linalg_eigvals, aten._linalg_det,
    aten._linalg_slogdet, aten.linalg_lu, aten.linalg_lu_factor_ex, aten.linalg_matrix_exp,
    aten.linalg_householder_product, aten.linalg_ldl_factor_ex, aten.geqrf,
)  # fmt: skip
def _decomposition(call: Call) -> Rule | None:
    batch = call.operands[0].dim() - 2
    if any(x.dim() < batch or x.shape[:batch] != call.operands[0].shape[:batch] for x in call.operands):
        return None
    inputs = [_stacked(x.dim(), batch) for x in call.operands]
    # An output that is left out (singular vectors nobody asked for) is empty, of one dim.
    outputs = [_stacked(o.dim(), batch) if o is not None else [] for o in call.outputs]
    if any(o is not None and o.dim() < batch for o in call.outputs):
        return DimRule([[None] * x.dim() for x in call.operands], outputs)
    return DimRule(inputs, outputs)


@rule(
    aten._linalg_solve_ex, aten.linalg_solve_triangular, aten.linalg_lu_solve, aten.cholesky_solve,
    aten.triangular_solve, aten.linalg_ldl_solve, aten.ormqr,
)  # fmt: skip
def _solve(call: Call) -> Rule | None:
    """Stacks of equal shape are free; a matrix that serves the whole stack is whole."""
    batch = max(x.dim() for x in call.operands) - 2
    stack = next(x.shape[:batch] for x in call.operands if x.dim() == batch + 2)
    inputs: list[Any] = []
    for x in call.operands:
        is_stack = x.dim() >= batch and x.shape[:batch] == stack
        if not is_stack and x.dim() != 2:
            return None
        inputs.append(_stacked(x.dim(), batch) if is_stack else [None] * x.dim())
    outputs = [_stacked(o.dim(), batch) if o is not None else [] for o in call.outputs]
    if any(o is None or o.shape[:batch] != stack for o in call.outputs):
        return None
    return DimRule(inputs, outputs)
