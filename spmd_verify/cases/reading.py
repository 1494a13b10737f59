"""What a case file holds, found by reading it and not by running it. Torch-free.

Says no more than the file's top level does: names that are defined, assigned or imported there.
What only exists when the file runs is found by `discovery`.
"""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

MARKERS: Final = ("get_inputs", "CASE", "CASES", "cases")
_OPENERS: Final = ("parallelize", "setup")
_USER_STYLE: Final = "user"
# Of `Case(model, inputs, name, ...)`; the name is given by its word or is not read here.
_ARGUMENTS: Final = 2


@dataclass(frozen=True)
class Reading:
    """What stands at the top level of a case file.

    Attributes:
        styles: The file's own styles, in its order.
        own_meshes: Those of them that bring a mesh, `mesh_NAME`.
        cases: Names of its explicit cases; empty where the file is one case; None where only
            running it tells.
    """

    styles: tuple[str, ...]
    own_meshes: frozenset[str]
    cases: tuple[str, ...] | None = ()


def read(path: Path) -> Reading | None:
    """Read a file; None where it holds no case.

    A case is inputs and a model: `get_inputs` beside `get_model`, a name `Model` or a class with
    a base; or an explicit `CASE`, `CASES` or `cases`. Files that begin with `_` or `test_`, and
    `conftest.py`, hold none.

    Raises:
        SyntaxError: The file mentions one of these names and is no Python.
    """
    if path.name.startswith(("_", "test_")) or path.name == "conftest.py":
        return None
    content = path.read_bytes()
    if not any(marker.encode() in content for marker in MARKERS):
        return None
    tree = ast.parse(content, str(path))
    names = dict(_names(tree))
    has_class = any(isinstance(each, ast.ClassDef) and each.bases for each in tree.body)
    has_model = has_class or "Model" in names or "get_model" in names
    has_inputs = "get_inputs" in names and has_model
    if not has_inputs and not any(marker in names for marker in MARKERS[1:]):
        return None
    styles = tuple(dict.fromkeys(_styles(names)))
    own_meshes = frozenset(name for name in styles if f"mesh_{name}" in names)
    mentions = sum(isinstance(node, ast.Name) and node.id == "CASES" for node in ast.walk(tree))
    return Reading(styles, own_meshes, _cases(names) if mentions < 2 else None)


def _cases(names: dict[str, ast.stmt]) -> tuple[str, ...] | None:
    """Return the cases of a literal `CASES`; None where there may be others or other names."""
    if "CASES" not in names and "cases" not in names:
        return ()
    statement = names.get("CASES")
    if "CASE" in names or "cases" in names or not isinstance(statement, ast.Assign):
        return None
    literal = statement.value
    if isinstance(literal, ast.Dict):
        keys: list[ast.expr | None] = list(literal.keys)
        values = literal.values
    elif isinstance(literal, (ast.List, ast.Tuple)):
        keys = [ast.Constant(f"case{at}") for at in range(len(literal.elts))]
        values = literal.elts
    else:
        return None
    told = [_case_name(key, value) for key, value in zip(keys, values, strict=True)]
    found = tuple(dict.fromkeys(name for name in told if name))
    if len(found) < len(values):
        return None
    return found if len(found) > 1 else ()


def _case_name(key: ast.expr | None, value: ast.expr) -> str | None:
    """Return what `Case(...)` is called, by itself or else by its key; None where it is unclear."""
    called = value.func if isinstance(value, ast.Call) else None
    called_name = getattr(called, "attr", getattr(called, "id", ""))
    if not isinstance(value, ast.Call) or called_name != "Case" or len(value.args) > _ARGUMENTS:
        return None
    if any(isinstance(each, ast.Starred) for each in value.args):
        return None
    given = {each.arg: each.value for each in value.keywords}
    if None in given:
        return None
    name = given.get("name", key)
    text = name.value if isinstance(name, ast.Constant) else None
    return text if isinstance(text, str) else None


def _styles(names: dict[str, ast.stmt]) -> Iterator[str]:
    """Give the styles that `parallelize`, `parallelize_NAME` and `setup_NAME` open."""
    for name, statement in names.items():
        opener, _, style = name.partition("_")
        is_opener = name == _OPENERS[0] or (opener in _OPENERS and style)
        if is_opener and _may_open(statement):
            yield style or _USER_STYLE


def _may_open(statement: ast.stmt) -> bool:
    """Say whether what a name stands for may take a model and a mesh and is none of torch's."""
    if isinstance(statement, ast.ImportFrom):
        return (statement.module or "").partition(".")[0] != "torch"
    if isinstance(statement, ast.FunctionDef):
        taken = statement.args
        most = len(taken.posonlyargs) + len(taken.args)
        required = most - len(taken.defaults)
        return required <= 2 and (most >= 2 or taken.vararg is not None)
    return isinstance(statement, (ast.Assign, ast.AnnAssign, ast.ClassDef))


def _names(tree: ast.Module) -> Iterator[tuple[str, ast.stmt]]:
    """Give every name that the top level binds, with its statement."""
    for statement in tree.body:
        if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
            yield statement.name, statement
        elif isinstance(statement, (ast.Import, ast.ImportFrom)):
            for alias in statement.names:
                yield (alias.asname or alias.name), statement
        elif isinstance(statement, ast.Assign):
            for target in statement.targets:
                for node in ast.walk(target):
                    if isinstance(node, ast.Name):
                        yield node.id, statement
        elif isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            yield statement.target.id, statement
