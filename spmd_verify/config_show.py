"""`spmd-verify config show`: every setting and where it comes from. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from spmd_verify.config import KEYS, Configuration
from spmd_verify.gate import Override, Waiver
from spmd_verify.options import Options
from spmd_verify.visible import visible

# Where a default is no value of its own.
_WORDS: Final[Mapping[str, str]] = {
    "styles": "engine and the file's own",
    "mesh": "2 ranks",
    "log-dir": "a temporary folder",
    "probe": "not for engine styles",
    "param-dtype": "none",
    "reduce-dtype": "none",
    "autocast": "none",
    "torch-compile": "none",
    "clip": "none",
    "baseline": "none",
    "budget": "none",
}


def render(found: Configuration, flags: Mapping[str, Any], options: Options) -> str:
    """Return one line a setting, then overrides and waivers.

    Args:
        found: Of pyproject.toml and the environment.
        flags: Settings given as flags; they win.
        options: What all of it came to.
    """
    lines = []
    for key in sorted(KEYS):
        if key in flags:
            lines.append((key, _text(flags[key]), "flag"))
        elif key in found.settings:
            setting = found.settings[key]
            lines.append((key, _text(setting.value), setting.source))
        else:
            lines.append((key, _default(key, options), "default"))
    widths = [max(len(line[column]) for line in lines) for column in (0, 1)]
    texts = [f"{k:<{widths[0]}}  {v:<{widths[1]}}  {source}" for k, v, source in lines]
    texts += [_override(override) for override in found.overrides]
    texts += [_waiver(waiver) for waiver in found.waivers]
    texts.append(f"pyproject.toml: {found.path or 'none here or above'}")
    return "\n".join(visible(text) for text in texts)


def _default(key: str, options: Options) -> str:
    """Return what holds where nothing was given."""
    if key in _WORDS:
        return _WORDS[key]
    if key == "fail-on":
        return _text(options.rules.fail_on)
    if key == "max-ranks":
        return f"{options.rank_limit} with --runner {options.runner}"
    name = {"timeout": "timeout_seconds"}.get(key, key.replace("-", "_"))
    return _text(getattr(options, name, getattr(options.variants, name, None)))


def _text(value: object) -> str:
    """Return a value as it is typed."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (list, tuple)):
        return ",".join(str(one) for one in value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def _override(override: Override) -> str:
    """Return the line of settings of some cells."""
    told = {"fail-on": override.fail_on, "strict": override.strict}
    given = ", ".join(f"{key} = {_text(value)}" for key, value in told.items() if value is not None)
    return f"override of {', '.join(override.cells)}: {given or 'nothing'}"


def _waiver(waiver: Waiver) -> str:
    """Return the line of a waiver."""
    return f"{waiver.text}: {waiver.reason}" + (f" (until {waiver.until})" if waiver.until else "")
