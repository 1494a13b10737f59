"""What the fork server imports once, so that every worker starts warm.

Importing this module does the work: only the fork server imports it, before anything is
forked. It must leave exactly one thread behind and never touch an accelerator. The list
matters: without `torch._dynamo` the first optimizer built in a worker costs 1.5 s, and
without `torch.distributed.tensor` the first functional collective costs 1 s (measured,
torch 2.13, CPU).
"""

from __future__ import annotations

import gc
import importlib
import os
import sys
import threading

from spmd_verify.runner.worker import die_with_parent

MODULES = (
    "torch",
    "torch.distributed",
    "torch._dynamo",
    "torch.distributed.tensor",
    "torch.distributed.device_mesh",
    "torch.distributed._functional_collectives",
    "torch.fx.experimental.proxy_tensor",
    "torch._functorch.aot_autograd",
    "torch.export._trace",
    "torch.nn.parallel",
    "torch.distributed.fsdp",
    "torch.distributed.tensor.parallel",
    "safetensors.torch",
)
"""Third-party modules every worker needs; imported whole before the first fork."""

OWN_MODULES = (
    "spmd",
    "spmd.compile",
    "spmd.lockstep",
    "spmd_verify.runner.family",
    "spmd_verify.runner.jobs",
    "spmd_verify.styles.graph",
)
"""Our own modules; what is missing here is reported by the job that needs it."""


def preload() -> None:
    """Import everything a worker needs and freeze it against the collector."""
    die_with_parent()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ["MKL_NUM_THREADS"] = "1"
    if os.path.exists("/sys/class/net/lo"):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    for name in MODULES:
        importlib.import_module(name)
    import torch

    torch.set_num_threads(1)
    for name in OWN_MODULES:
        try:
            importlib.import_module(name)
        except ModuleNotFoundError:
            continue
    _give_tqdm_a_lock()
    gc.collect()
    gc.freeze()


def _give_tqdm_a_lock() -> None:
    """Keep tqdm from making a semaphore of the system's in every worker.

    torch's graph interpreter builds a progress bar even when it shows none; the semaphore
    would outlive a worker that is killed, and Python would warn about it at exit.
    """
    tqdm = sys.modules.get("tqdm")
    if tqdm is not None:
        tqdm.tqdm.set_lock(threading.RLock())
        tqdm.tqdm.monitor_interval = 0  # a thread that no fork would carry over


preload()
