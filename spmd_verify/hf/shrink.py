"""Shrink a Hugging Face configuration by the rules of `shrink.json`. Torch-free.

The rules are generic; what they cannot know about an architecture stands in the data file,
the only place where a model's name may stand.
"""

import functools
import json
from collections.abc import Mapping
from importlib import resources
from typing import Any, Final

# Random tokens start above the small ids that special tokens are moved to.
FIRST_PLAIN_TOKEN: Final = 3
_PADDING_ID: Final = 0
_SPECIAL_ID: Final = 1


@functools.cache
def rules_text() -> str:
    """Return the data file as text."""
    return resources.files("spmd_verify.hf").joinpath("shrink.json").read_text()


@functools.cache
def rules() -> dict[str, Any]:
    """Return the data file: `fields`, `key_value_heads`, `heads`, `types`, `overrides`."""
    loaded: dict[str, Any] = json.loads(rules_text())
    return loaded


def shrunk(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return the constructor arguments that make a configuration tiny.

    Args:
        defaults: The default configuration as a dict, nested configurations as dicts with
            their `model_type`.

    Returns:
        Only what differs from the default.
    """
    small: dict[str, Any] = {}
    for name, value in rules()["fields"].items():
        if name in defaults and _is_number(defaults[name]):
            small[name] = _like(value, defaults[name])
    for name, value in rules()["lists"].items():
        if isinstance(defaults.get(name), (list, tuple)):
            small[name] = [value] * len(defaults[name])
    for name, default in defaults.items():
        if isinstance(default, dict) and "model_type" in default:
            small[name] = {"model_type": default["model_type"], **shrunk(default)}
    if "use_cache" in defaults:
        small["use_cache"] = False
    _keep_heads_equal(small, defaults)
    for name, value in rules()["overrides"].get(defaults.get("model_type"), {}).items():
        _override(small, defaults, name, value)
    small.update(_special_tokens({**defaults, **small}))
    return small


def _override(small: dict[str, Any], defaults: Mapping[str, Any], name: str, value: Any) -> None:
    """Apply one entry of `overrides`; null leaves the default where there is a number."""
    if value is None and _is_number(defaults.get(name)):
        small.pop(name, None)
    elif (
        isinstance(value, dict) and isinstance(small.get(name), dict) and "model_type" not in value
    ):
        small[name] = {**small[name], **value}
    elif name in defaults:
        small[name] = value


def _keep_heads_equal(small: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Give as many key/value heads as heads where the architecture wants them equal."""
    latent = _is_number(defaults.get("kv_lora_rank"))
    for name, heads in rules()["key_value_heads"].items():
        if name in small and heads in small and (latent or defaults[name] == defaults[heads]):
            small[name] = small[heads]


def _special_tokens(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return special token ids beyond the vocabulary as 1, padding as 0."""
    size = values.get("vocab_size")
    if not _is_number(size):
        return {}
    moved: dict[str, Any] = {}
    for name, value in values.items():
        if not name.endswith(("_token_id", "_token_index")):
            continue
        inside = _PADDING_ID if name.startswith("pad") else _SPECIAL_ID
        if isinstance(value, list) and any(token >= size for token in value):
            moved[name] = [inside]
        elif _is_number(value) and value >= size:
            moved[name] = inside
    return moved


def _is_number(value: Any) -> bool:
    """Say whether a value is a plain number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _like(value: float, default: float) -> float:
    """Return the value in the default's type: typed configurations refuse 0.0 for 0."""
    return int(value) if isinstance(default, int) else float(value)
