"""Linear algebra on stacks of matrices: the stack's dims are free, the matrices are whole."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from spmd.rules.base import Call, DimRule, Label, Rule, aligned, rule

aten = torch.ops.aten


def _stacked(ndim: int, batch: int) -> list[Label | None]:
    return [*range(batch), *([None] * (ndim - batch))]


@rule(
    aten.linalg_inv_ex, aten.linalg_cholesky_ex, aten.cholesky_inverse, aten.linalg_qr,
    aten._linalg_svd, aten._linalg_eigh, aten.linalg_eig, aten.linalg_eigvals, aten._linalg_det,
    aten._linalg_slogdet, aten.linalg_lu, aten.linalg_lu_factor_ex, aten.linalg_matrix_exp,
    aten.linalg_householder_product, aten.linalg_ldl_factor_ex, aten.geqrf, aten.linalg_pinv,
)  # fmt: skip
def _decomposition(call: Call) -> Rule | None:
    batch = call.operands[0].dim() - 2
    stack = call.operands[0].shape[:batch]
    if any(x.dim() and (x.dim() < batch or x.shape[:batch] != stack) for x in call.operands):
        return None
    inputs = [_stacked(x.dim(), batch) if x.dim() else [] for x in call.operands]
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
    """Stacks of equal shape are free; what serves the whole stack is whole."""
    batch = max(x.dim() for x in call.operands) - 2
    stack = next(x.shape[:batch] for x in call.operands if x.dim() == batch + 2)
    vectors = call.target == aten._linalg_solve_ex.default
    inputs: list[Any] = []
    for x in call.operands:
        pivots = not x.dtype.is_floating_point and not x.dtype.is_complex
        as_vectors = vectors and _reads_as_vectors(x, call.operands[0])
        if pivots or as_vectors or x.dim() == batch + 2:
            if x.shape[:batch] != stack:
                return None
            inputs.append(_stacked(x.dim(), batch))
        elif x.dim() <= 2 and not (vectors and x.dim() == 2 and x.shape[1] == x.shape[0]):
            # Square, it could read as vectors beside a part of as many matrices.
            inputs.append([None] * x.dim())
        else:
            return None
    outputs = [_stacked(o.dim(), batch) if o is not None else [] for o in call.outputs]
    if any(o is None or o.shape[:batch] != stack for o in call.outputs):
        return None
    return DimRule(inputs, outputs)


def _reads_as_vectors(x: Tensor, matrices: Tensor) -> bool:
    """Whether torch reads the right-hand side as one vector per matrix."""
    return x.dim() == matrices.dim() - 1 and x.shape == matrices.shape[:-1]


@rule(aten.linalg_cross.default)
def _cross(call: Call) -> Rule:
    out = call.outputs[0]
    assert out is not None
    dim = call.argument("dim") % out.dim()
    inputs = [aligned(x.shape, out.dim(), out.shape) for x in call.operands]
    inputs = [[None if label == dim else label for label in labels] for labels in inputs]
    return DimRule(inputs, [[None if i == dim else i for i in range(out.dim())]])
