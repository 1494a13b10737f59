"""Settings from `[tool.spmd-verify]` in pyproject.toml and from `SPMD_VERIFY_*`. Torch-free.

In rising order: built-in default, pyproject.toml, environment, flag. An unknown key is an
error that names the nearest one. `overrides` and `waivers` stand in pyproject.toml only.
"""

import os
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from spmd_verify.errors import UsageError, choices_text
from spmd_verify.gate import Override, Waiver, check_fail_on, globs_from, waiver_from

TABLE: Final = "spmd-verify"
ENVIRONMENT_PREFIX: Final = "SPMD_VERIFY_"


def _words(value: Any) -> tuple[str, ...]:
    """Read a list, or one string with commas."""
    parts = value.split(",") if isinstance(value, str) else value
    if not isinstance(parts, (list, tuple)) or not all(isinstance(part, str) for part in parts):
        raise ValueError("expected a list of strings")
    return tuple(part.strip() for part in parts if part.strip())


def _truth(value: Any) -> bool:
    """Read a boolean, or one of the usual words for it."""
    known = {"1": True, "true": True, "yes": True, "0": False, "false": False, "no": False}
    word = str(value).lower()
    if word not in known:
        raise ValueError("expected true or false")
    return known[word]


def _text(value: Any) -> str:
    """Read a string; a number stands for its digits, as in `mesh = 4`."""
    if isinstance(value, bool) or not isinstance(value, (str, int)):
        raise ValueError("expected a string")
    return str(value)


# Key -> how to read its value. Keys are those of the flags, without the leading dashes.
KEYS: Final[dict[str, Callable[[Any], Any]]] = {
    "styles": _words,
    "mesh": _text,
    "dtype": _text,
    "exact": _truth,
    "steps": int,
    "seed": int,
    "timeout": float,
    "runner": _text,
    "max-ranks": int,
    "log-dir": _text,
    "no-cache": _truth,
    "strict": _truth,
    "fail-on": _words,
    "baseline": _text,
    "budget": float,
    "probe": _truth,
    "pp-schedule": _text,
    "accumulate": int,
    "clip": float,
    "autocast": _text,
    "param-dtype": _text,
    "reduce-dtype": _text,
    "checkpoint-activations": _truth,
    "torch-compile": _text,
    "train-eval-train": _truth,
    "resume-check": _truth,
}


TABLES: Final = ("overrides", "waivers")
# The settings that may differ by cell: those that judge it, not those that run it.
OVERRIDE_KEYS: Final = ("fail-on", "strict")


@dataclass(frozen=True)
class Setting:
    """A value and where it was given."""

    value: Any
    source: str


@dataclass(frozen=True)
class Configuration:
    """What pyproject.toml and the environment say.

    Attributes:
        settings: By the flags' names without dashes.
        overrides: Settings of some cells, in the file's order.
        waivers: Cells that may fail, in the file's order.
        path: The pyproject.toml that was read; None where there is none.
    """

    settings: dict[str, Setting] = field(default_factory=dict)
    overrides: tuple[Override, ...] = ()
    waivers: tuple[Waiver, ...] = ()
    path: Path | None = None


def load(folder: Path, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the values of `read`."""
    found = read(folder, environment).settings
    return {key: setting.value for key, setting in found.items()}


def read(folder: Path, environment: Mapping[str, str] | None = None) -> Configuration:
    """Return what pyproject.toml and the environment give.

    Args:
        folder: Where to look for pyproject.toml, then in its parents.
        environment: `os.environ` when left out.

    Raises:
        UsageError: `config-unreadable`, `unknown-setting`, `bad-setting`, `unknown-verdict`,
            `bad-waiver`.
    """
    path = _find(folder)
    table = {} if path is None else _table(path)
    source = f"[tool.{TABLE}] in {path}"
    overrides, waivers = _tables(table, "overrides", source), _tables(table, "waivers", source)
    settings = {key: Setting(_read(key, value, source), source) for key, value in table.items()}
    for name, value in (os.environ if environment is None else environment).items():
        if name.startswith(ENVIRONMENT_PREFIX):
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("_", "-")
            source_of = f"environment variable {name}"
            settings[key] = Setting(_read(key, value, source_of), source_of)
    return Configuration(
        settings=settings,
        overrides=tuple(_override(plain, where) for where, plain in overrides),
        waivers=tuple(waiver_from(plain, where) for where, plain in waivers),
        path=path,
    )


def _find(folder: Path) -> Path | None:
    """Return the nearest pyproject.toml at or above a folder."""
    for parent in [folder, *folder.parents]:
        if (parent / "pyproject.toml").is_file():
            return parent / "pyproject.toml"
    return None


def _table(path: Path) -> dict[str, Any]:
    """Return our table of a pyproject.toml; empty where there is none."""
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, OSError) as error:
        raise _unreadable(path, str(error)) from error
    table = content.get("tool", {})
    table = table.get(TABLE, {}) if isinstance(table, dict) else table
    if not isinstance(table, dict):
        raise _unreadable(path, f"{table!r}, expected a table [tool.{TABLE}]")
    return dict(table)


def _unreadable(path: Path, why: str) -> UsageError:
    return UsageError(
        f"Cannot read the configuration: {path}. Got {why}. Correct the file",
        slug="config-unreadable",
    )


def _tables(table: dict[str, Any], key: str, source: str) -> list[tuple[str, Any]]:
    """Take an array of tables out of ours; give each with where it stands."""
    found = table.pop(key, [])
    if not isinstance(found, list):
        raise UsageError(
            f"Cannot read a setting: {source}. Got {key} = {found!r}, expected tables "
            f"[[tool.{TABLE}.{key}]]. Correct the file",
            slug="bad-setting",
        )
    name = source.replace(f"[tool.{TABLE}]", f"[[tool.{TABLE}.{key}]]", 1)
    return [(f"{name}, number {number}", plain) for number, plain in enumerate(found, 1)]


def _override(plain: Any, where: str) -> Override:
    """Read the settings of some cells."""
    table = dict(plain) if isinstance(plain, dict) else {}
    globs = globs_from(table.pop("cells", None))
    if not globs:
        raise UsageError(
            f"Cannot read a setting: {where}. Got {plain!r}, expected cells = ['*/STYLE', ...]. "
            f"Name the cells",
            slug="bad-setting",
        )
    for key in table:
        if key not in OVERRIDE_KEYS:
            given = "which holds for all cells" if key in KEYS else choices_text(key, OVERRIDE_KEYS)
            raise UsageError(
                f"Unknown setting: {where}. Got {key!r}, {given}. By cell there are "
                f"{' and '.join(OVERRIDE_KEYS)}",
                slug="unknown-setting",
            )
    told = {key: _read(key, value, where) for key, value in table.items()}
    return Override(globs, told.get("fail-on"), told.get("strict"))


def _read(key: str, value: Any, where: str) -> Any:
    """Check one setting and bring it into its type."""
    if key not in KEYS:
        raise UsageError(
            f"Unknown setting: {where}. Got {key!r}; {choices_text(key, (*KEYS, *TABLES))}",
            slug="unknown-setting",
        )
    try:
        found = KEYS[key](value)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"Cannot read a setting: {where}. Got {key} = {value!r}: {error}. Correct the value",
            slug="bad-setting",
        ) from error
    return check_fail_on(found, f"{where}: fail-on") if key == "fail-on" else found
