"""Settings from `[tool.spmd-verify]` in pyproject.toml and from `SPMD_VERIFY_*`. Torch-free.

In rising order: built-in default, pyproject.toml, environment, flag. An unknown key is an
error that names the nearest one.
"""

import os
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from spmd_verify.errors import UsageError, choices_text

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


def load(folder: Path, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the settings that pyproject.toml and the environment give.

    Args:
        folder: Where to look for pyproject.toml, then in its parents.
        environment: `os.environ` when left out.

    Raises:
        UsageError: `config-unreadable`, `unknown-setting`, `bad-setting`.
    """
    path = _find(folder)
    settings: dict[str, Any] = {}
    if path is not None:
        for key, value in _table(path).items():
            settings[key] = _read(key, value, f"[tool.{TABLE}] in {path}")
    for name, value in (os.environ if environment is None else environment).items():
        if name.startswith(ENVIRONMENT_PREFIX):
            key = name.removeprefix(ENVIRONMENT_PREFIX).lower().replace("_", "-")
            settings[key] = _read(key, value, f"environment variable {name}")
    return settings


def _find(folder: Path) -> Path | None:
    """Return the nearest pyproject.toml at or above a folder."""
    for parent in [folder, *folder.parents]:
        if (parent / "pyproject.toml").is_file():
            return parent / "pyproject.toml"
    return None


def _table(path: Path) -> dict[str, Any]:
    """Return our table of a pyproject.toml; empty where there is none."""
    try:
        content = tomllib.loads(path.read_text())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"Cannot read the configuration: {path}. Got {error}. Correct the file",
            slug="config-unreadable",
        ) from error
    table: dict[str, Any] = content.get("tool", {}).get(TABLE, {})
    return table


def _read(key: str, value: Any, where: str) -> Any:
    """Check one setting and bring it into its type."""
    if key not in KEYS:
        raise UsageError(
            f"Unknown setting: {where}. Got {key!r}; {choices_text(key, KEYS)}",
            slug="unknown-setting",
        )
    try:
        return KEYS[key](value)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"Cannot read a setting: {where}. Got {key} = {value!r}: {error}. Correct the value",
            slug="bad-setting",
        ) from error
