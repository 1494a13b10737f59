"""The files that a reproducing script needs beside it. Torch-free but for the refusal."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from spmd_verify.cases.address import Address
from spmd_verify.repros.case import refusal


def copies_of(address: Address, target: Path) -> Iterator[Path]:
    """Give the files that the script needs beside it and has not: the case and its modules.

    Raises:
        Unsupported: `no-repro`: the case imports a package of its folder.
        UsageError: `report-not-written`: another file has the name.
    """
    start = Path(address.source).resolve()
    if start.parent == target.resolve().parent:
        return
    waiting, seen = [start], {start}
    while waiting:
        path = waiting.pop()
        yield path
        for name in _imported(path):
            beside = start.parent / f"{name}.py"
            if (start.parent / name / "__init__.py").is_file():
                raise refusal(
                    f"{path.name} imports the package {name} of its folder",
                    "Only single modules are copied",
                    f"Write the script into that folder: --output {start.parent}/repro.py",
                )
            if beside.is_file() and beside not in seen:
                seen.add(beside)
                waiting.append(beside)


def _imported(path: Path) -> Iterator[str]:
    """Give the top-level names that a file imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_bytes())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]
