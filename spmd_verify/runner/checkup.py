"""The job by which `doctor` sees whether ranks start and talk to each other."""

from __future__ import annotations

from spmd_verify.runner.specs import encode
from spmd_verify.runner.worker import Context, job


@job
def sum_ranks(context: Context, _payload: bytes) -> bytes:
    """Sum `rank + 1` over the ranks, alone without a group; the sum as msgpack float."""
    import torch
    import torch.distributed as dist

    own = torch.tensor([context.rank + 1.0])
    if context.has_group:
        context.note("entering all_reduce")
        dist.all_reduce(own)
    return encode(float(own))
