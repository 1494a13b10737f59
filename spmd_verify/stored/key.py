"""What a reference depends on, as one name; and the proof that a cached one still holds.

The name finds an entry. Whether it is used decides one run on one device: what that run
computes has to be the cached reference bit for bit, so that nothing the name leaves out - a
data file, an environment variable, an installed package - can bring back an old one.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import importlib.util
import os
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Final

import numpy
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from spmd_verify.cases.address import parse
from spmd_verify.cases.case import LoadedCase
from spmd_verify.norms import as_real
from spmd_verify.reference.single import SingleDevice
from spmd_verify.reference.trajectory import (
    hyper_parameters,
    named_buffers,
    named_parameters,
    optimizers_of,
    same_bits,
)
from spmd_verify.stored.store import Store
from spmd_verify.version import __version__

# Variables that choose kernels.
_PREFIXES: Final = ("ATEN_", "DNNL_", "KMP_", "MKL_", "OMP_", "ONEDNN_", "PYTORCH_", "TORCH_")
# A virtual environment may lie below the case's folder.
_INSTALLED: Final = frozenset(("site-packages", "dist-packages"))
_KEY_BYTES: Final = 20


def reference_key(case: LoadedCase) -> str:
    """Return the name of a case's reference in the cache, in hexadecimal.

    Covers the case file and the modules it imports from its own folder, settings, bits of
    every batch and of the initial model, optimizer, versions, machine, and the checker's own
    sources.
    """
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)
    # Without the address: a file reached by another path is the same file.
    settings = case.settings
    parts: list[Any] = [
        (str(settings.dtype), settings.seed, settings.steps, sorted(settings.overrides.items())),
        case.source_hash,
        parse(case.address).kind,
        case.address.rpartition("/")[2],
        sorted(_user_modules(case)),
        own_sources(),
        _environment(case),
    ]
    digest.update(repr(parts).encode())
    for step in range(case.steps):
        leaves, form = pytree.tree_flatten(case.batch(step))
        digest.update(f"{step}{form}".encode())
        for leaf in leaves:
            _add(digest, leaf)
    model = case.build_model()
    for named in (named_parameters(model)[0], named_buffers(model)[0]):
        for name, tensor in named.items():
            digest.update(f"{name}{tensor.requires_grad}".encode())
            _add(digest, tensor)
    optimizer = case.optimizer(model)
    kinds = [type(single).__qualname__ for single in optimizers_of(optimizer)]
    digest.update(repr((kinds, hyper_parameters(optimizer))).encode())
    return digest.hexdigest()


def still_holds(case: LoadedCase, store_path: str | Path) -> bool:
    """Say whether one run on one device gives a stored reference, bit for bit."""
    store = Store(store_path)
    run = SingleDevice(case).run()
    stored = [(e.step, e.stage, e.name) for e in store.index.entries]
    found = {
        (step, stage, name): value
        for step, record in enumerate(run.steps)
        for stage, tensors in record.items()
        for name, value in tensors.items()
    }
    return (
        set(stored) == set(found)
        and run.hyper_parameters == store.index.hyper_parameters
        and all(same_bits(store.expected(*key), value) for key, value in found.items())
    )


def _add(digest: Any, value: Any) -> None:
    """Take a tensor's dtype, shape and bits into a digest, or the text of anything else."""
    if not isinstance(value, Tensor):
        digest.update(repr(value).encode())
        return
    digest.update(f"{value.dtype}{tuple(value.shape)}".encode())
    if value.numel() and value.layout == torch.strided:
        raw = as_real(value.detach()).cpu().contiguous()
        digest.update(raw.reshape(-1).view(torch.uint8).numpy().data)


@functools.cache
def own_sources() -> str:
    """Return a digest of the checker's sources: other code may measure other floors."""
    digest = hashlib.blake2b(digest_size=_KEY_BYTES)
    root = Path(__file__).resolve().parents[1]
    for path in sorted([*root.rglob("*.py"), *root.rglob("*.json")]):
        digest.update(str(path.relative_to(root)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _environment(case: LoadedCase) -> list[Any]:
    """Return versions, machine and settings that choose kernels."""
    versions = [__version__, str(torch.__version__), numpy.__version__, platform.python_version()]
    if parse(case.address).kind == "hf":
        versions.append(getattr(sys.modules.get("transformers"), "__version__", ""))
    chosen = sorted(item for item in os.environ.items() if item[0].startswith(_PREFIXES))
    switches = [
        torch.get_num_threads(),
        torch.backends.cpu.get_cpu_capability(),
        torch.backends.mkldnn.enabled,
        torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(),
    ]
    return [*versions, platform.machine(), _processor(), switches, chosen]


@functools.cache
def _processor() -> str:
    """Return model and features of the processor, which choose kernels; "" where not told."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        kinds = ("model name", "flags", "Features", "CPU part")
        return "\n".join(dict.fromkeys(line for line in lines if line.startswith(kinds)))
    return platform.processor()


def _user_modules(case: LoadedCase) -> Iterator[tuple[str, str]]:
    """Give name and digest of every module that a case's file imports from its own folder.

    Found in the source, not among the loaded modules, which earlier cases added to.
    """
    address = parse(case.address)
    if address.kind == "hf":
        return
    if address.kind == "file":
        path = Path(address.source).resolve()
        root, package = path.parent, ""
    else:
        module = sys.modules.get(address.source)
        if getattr(module, "__file__", None) is None:
            return
        path = Path(str(module.__file__)).resolve()  # type: ignore[union-attr]
        package = str(getattr(module, "__package__", "") or "")
        root = path.parents[len(package.split(".")) if package else 0]
    seen: set[Path] = {path}
    pending = [(path, package)]
    while pending:
        path, package = pending.pop()
        for name in _imported(path, package):
            module = sys.modules.get(name)
            found = _file_below(module, root)
            if found is None or found in seen:
                continue
            seen.add(found)
            pending.append((found, str(getattr(module, "__package__", "") or "")))
            yield name, hashlib.blake2b(found.read_bytes(), digest_size=_KEY_BYTES).hexdigest()


def _file_below(module: ModuleType | None, root: Path) -> Path | None:
    """Return the source file of a module if it lies below a folder."""
    file = getattr(module, "__file__", None)
    if file is None:
        return None
    path = Path(file).resolve()
    is_users = path.is_relative_to(root) and not _INSTALLED & set(path.parts)
    return path if is_users and path.suffix == ".py" else None


def _imported(path: Path, package: str) -> set[str]:
    """Return the names of all modules that a file may import, their packages included."""
    names: set[str] = set()
    with contextlib.suppress(OSError, SyntaxError, ValueError, ImportError):
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                dots = "." * node.level
                base = importlib.util.resolve_name(f"{dots}{node.module or ''}", package)
                names.add(base)
                names.update(f"{base}.{alias.name}" for alias in node.names)
    parents = {name.rsplit(".", depth)[0] for name in names for depth in range(name.count(".") + 1)}
    return names | parents
