"""Addresses of cases: what a target on the command line means. Torch-free, imports no user code.

Forms: `model.py`, `model.py:Net`, `model.py::case`, `package.module:make_model`, a
directory, and `hf:TYPE?field=value`.
"""

import ast
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from spmd_verify.errors import CaseError, UsageError, choices_text

_MARKERS: Final = frozenset({"get_inputs", "CASE", "CASES", "cases"})


@dataclass(frozen=True)
class Address:
    """One parsed address.

    Attributes:
        text: As typed; identifies the case in every record and worker.
        kind: `file`, `module` or `hf`.
        source: Path of the file, dotted module, or what follows `hf:`.
        attribute: Class or function after `:`.
        case: Name of an explicit case after `::`.
    """

    text: str
    kind: str
    source: str
    attribute: str | None = None
    case: str | None = None


def parse(text: str) -> Address:
    """Take an address apart.

    Raises:
        UsageError: `no-such-file` where it names nothing that exists; `bad-address`.
    """
    if text.startswith("hf:"):
        return Address(text, "hf", text[len("hf:") :])
    source, separator, rest = text.partition(":")
    case = rest[1:] if rest.startswith(":") else None
    attribute = rest if separator and case is None else None
    if (separator and not rest) or case == "":
        raise UsageError(
            f"Cannot read the address: {text!r}. Nothing stands after {separator!r}. Write "
            f"model.py, model.py:Net or model.py::case",
            slug="bad-address",
        )
    if source.endswith(".py") or os.sep in source or Path(source).exists():
        return Address(text, "file", _existing(source), attribute, case)
    if separator and all(part.isidentifier() for part in source.split(".")):
        return Address(text, "module", source, attribute, case)
    raise _no_such_file(source)


def expand(targets: tuple[str, ...]) -> list[str]:
    """Return the addresses that the targets name; a directory gives every case file in it.

    A file of a directory counts when it defines, at top level, one of `get_inputs`, `CASE`,
    `CASES` or `cases`; files that begin with `_` or `test_` do not.

    Raises:
        UsageError: `no-such-file`, `empty-directory`.
    """
    addresses: list[str] = []
    for target in targets:
        if target.startswith("hf:") or not Path(target).is_dir():
            parse(target)
            addresses.append(target)
            continue
        found = [str(path) for path in sorted(Path(target).rglob("*.py")) if _is_case_file(path)]
        if not found:
            raise UsageError(
                f"No case in the directory: {target!r}. Expected a .py file that defines "
                f"get_inputs or CASE at top level. Name a file instead",
                slug="empty-directory",
            )
        addresses.extend(found)
    return addresses


def _existing(source: str) -> str:
    """Return the path if it is a file."""
    if not Path(source).is_file():
        raise _no_such_file(source)
    return source


def _no_such_file(source: str) -> CaseError:
    folder = Path(source).parent
    names = sorted(path.name for path in folder.glob("*.py")) if folder.is_dir() else []
    hint = choices_text(Path(source).name, names) if names else "the folder holds no .py file"
    return CaseError(
        f"No such file: {source!r} in {str(folder.resolve())!r}; {hint}. Give the path of a "
        f"model file, package.module:function, or hf:TYPE",
        slug="no-such-file",
    )


def _is_case_file(path: Path) -> bool:
    """Say whether a file looks like a case, by its top-level names."""
    if path.name.startswith(("_", "test_")):
        return False
    try:
        tree = ast.parse(path.read_bytes())
    except SyntaxError:
        return "get_inputs" in path.read_text(errors="replace")
    names: set[str] = set()
    for statement in tree.body:
        if isinstance(statement, ast.FunctionDef):
            names.add(statement.name)
        elif isinstance(statement, ast.Assign):
            names.update(node.id for node in statement.targets if isinstance(node, ast.Name))
    return bool(names & _MARKERS)
