"""Every error has a slug with a heading in docs/errors.md, and survives a pipe."""

import ast
import pickle
import re
from pathlib import Path

import pytest

from spmd_verify import errors
from spmd_verify.errors import CaseError, InternalError, RankError, Unsupported, choices_text

SLUG = re.compile(r"[a-z0-9]+(-[a-z0-9]+)+")
CALLS = re.compile(r"(Error|Failure)$")


def _slugs_in_source(root: Path) -> set[str]:
    """Collect the slugs that errors are raised with.

    They are `slug=` arguments, `slug = ` class attributes, and arguments by position that look
    like a slug in calls of `...Error` and `Failure`.
    """
    found: set[str] = set()
    for path in [*(root / "spmd").rglob("*.py"), *(root / "spmd_verify").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            values: list[ast.expr] = []
            if isinstance(node, ast.keyword) and node.arg == "slug":
                values.append(node.value)
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "slug":
                values.append(node.value)
            if isinstance(node, ast.Call) and CALLS.search(ast.unparse(node.func)):
                values += [value for value in node.args if SLUG.fullmatch(_text(value))]
            found.update(text for value in values if (text := _text(value)))
    return found


def _text(node: ast.expr) -> str:
    """Return a literal string; empty for anything else."""
    is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value if is_text else ""  # type: ignore[attr-defined]


def test_slugs_and_headings_are_the_same_set(root: Path) -> None:
    headings = re.findall(r"^### (\S+)$", (root / "docs/errors.md").read_text(), re.MULTILINE)
    # A rank that raised something of its own has its slug behind an `or`.
    assert set(headings) == _slugs_in_source(root) | {"rank-raised"}
    assert len(headings) == len(set(headings))


def test_an_error_survives_pickling_with_its_parts() -> None:
    error = CaseError("It failed", slug="no-module", detail="trace", fields={"error": "KeyError"})

    copy = pickle.loads(pickle.dumps(error))

    assert type(copy) is CaseError
    assert (str(copy), copy.detail, copy.fields) == (
        "It failed [no-module]",
        "trace",
        {"error": "KeyError"},
    )


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        (errors.UsageError, 2),
        (CaseError, 2),
        (errors.ReferenceRunError, 2),
        (errors.RecordError, 2),
        (RankError, 3),
        (InternalError, 4),
        (Unsupported, 5),
    ],
)
def test_every_kind_has_the_exit_code_of_the_table(
    kind: type[errors.SpmdVerifyError], code: int
) -> None:
    assert kind.exit_code == code


def test_few_choices_are_all_listed_with_the_nearest() -> None:
    assert choices_text("flot32", ["float32", "float64"]) == (
        "valid: float32, float64; did you mean 'float32'?"
    )


def test_many_choices_give_the_nearest_only() -> None:
    names = [f"name{index}" for index in range(20)] + ["replicate"]

    assert choices_text("replicat", names) == "did you mean 'replicate'?"
    assert choices_text("zzz", names) == "21 names are valid"
    assert choices_text("zzz", []) == "there are none"
