"""Cases from Hugging Face architectures: `hf:TYPE`, `hf:HEAD/TYPE`, `?field=value`.

`?batch=4` is the number of samples, `?padding=0` leaves tokens unpadded: then all ranks of a
data-parallel style count equally many of them.

Built from the configuration with random weights, never from the hub. Which head a type
has, and how its configuration is made tiny, stands in `shrink.json`.
"""

import ast
import copy
import hashlib
import importlib
import inspect
import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

from torch import nn

from spmd_verify.cases.hooks import Case
from spmd_verify.errors import CaseError, UsageError, choices_text
from spmd_verify.hf.inputs import make_inputs
from spmd_verify.hf.shrink import rules, rules_text, shrunk
from spmd_verify.user_code import UserCode

DEFAULT_BATCH: Final = 8
_NEEDS_START_TOKEN: Final = ("seq2seq", "speech2seq")
# "eager" has a data-dependent nonzero and cannot be captured; "grouped_mm" has no float64.
_EXPERTS: Final = "batched_mm"


@dataclass(frozen=True)
class HfAddress:
    """What stands after `hf:`, taken apart.

    Attributes:
        head: A key of `heads` in the data file.
        model_type: `model_type` of the configuration.
        batch: Samples in the global batch.
        padding: Whether rows of tokens are padded, unequally.
        fields: Overridden configuration fields, nested ones by dotted name.
    """

    head: str
    model_type: str
    batch: int
    padding: bool
    fields: dict[str, Any]


@dataclass(frozen=True)
class Built:
    """What a model is built from, in words that transformers alone understands.

    Attributes:
        auto: Name of the auto class.
        model_type: Of the configuration.
        fields: What is given to the configuration.
        experts: How experts are computed.
        version: Of transformers.
    """

    auto: str
    model_type: str
    fields: dict[str, Any]
    experts: str
    version: str


def built(source: str, overrides: Mapping[str, str]) -> Built:
    """Return what the model of an address is built from.

    Raises:
        CaseError: As `hf_case`.
    """
    transformers = _transformers()
    address = parse_hf(source, overrides, transformers)
    auto = rules()["heads"][address.head][0]
    fields = _fields(transformers, address)
    return Built(auto, address.model_type, fields, _EXPERTS, transformers.__version__)


def hf_case(source: str, overrides: Mapping[str, str]) -> tuple[Case, str]:
    """Return the case of an address and a hash of all it depends on.

    Args:
        source: What follows `hf:`.
        overrides: More `field=value` pairs, over those of the address.

    Raises:
        CaseError: `hf-missing`, `hf-unknown-type`, `hf-no-head`, `hf-unknown-field`,
            `hf-refused`.
    """
    transformers = _transformers()
    address = parse_hf(source, overrides, transformers)
    config = _configuration(transformers, address)
    auto = getattr(transformers, rules()["heads"][address.head][0])

    def get_model() -> nn.Module:
        model: nn.Module = auto.from_config(copy.deepcopy(config), experts_implementation=_EXPERTS)
        return model.train()

    def get_inputs() -> dict[str, Any]:
        model_class = _model_class(transformers, address)
        names = inspect.signature(model_class.forward).parameters
        return make_inputs(
            address.head, model_class, config, address.batch, names, padding=address.padding
        )

    case = Case(
        model=get_model,
        inputs=get_inputs,
        name=address.model_type,
        origin={
            "model": f"{auto.__name__}.from_config, {address.model_type}, shrunk",
            "inputs": f"{address.batch} samples for the head {address.head!r}",
        },
    )
    identity = f"{source}|{sorted(overrides.items())}|{transformers.__version__}|{rules_text()}"
    return case, hashlib.sha256(identity.encode()).hexdigest()


def parse_hf(source: str, overrides: Mapping[str, str], transformers: ModuleType) -> HfAddress:
    """Take an address apart and check its type and head.

    Raises:
        CaseError: `hf-unknown-type`, `hf-no-head`.
        UsageError: `bad-number`, `bad-address`.
    """
    path, _, query = source.partition("?")
    head, _, model_type = path.rpartition("/")
    fields: dict[str, Any] = {}
    for pair in [part for part in query.split("&") if part]:
        name, equals, value = pair.partition("=")
        if not equals or not name:
            raise UsageError(
                f"Cannot read the address: 'hf:{source}'. Got {pair!r}, expected field=value",
                slug="bad-address",
            )
        fields[name] = _literal(value)
    fields.update({name: _literal(value) for name, value in overrides.items()})
    batch = fields.pop("batch", DEFAULT_BATCH)
    if not isinstance(batch, int) or batch < 1:
        raise UsageError(
            f"Number out of range: batch={batch!r}. Expected at least 1", slug="bad-number"
        )
    padding = fields.pop("padding", 1)
    if padding not in (0, 1):
        raise UsageError(
            f"Number out of range: padding={padding!r}. Expected 0 or 1", slug="bad-number"
        )
    auto = importlib.import_module("transformers.models.auto.configuration_auto")
    known = list(auto.CONFIG_MAPPING_NAMES)
    if model_type not in known:
        raise CaseError(
            f"Unknown Hugging Face type: {model_type!r}; {choices_text(model_type, known)}. Use a "
            f"model_type of transformers {transformers.__version__}",
            slug="hf-unknown-type",
        )
    return HfAddress(_head(head, model_type), model_type, batch, bool(padding), fields)


def _head(asked: str, model_type: str) -> str:
    """Return the head asked for, else the first of the data file that the type has."""
    heads = [head for head in rules()["heads"] if model_type in _class_names(head)]
    if asked and asked in heads:
        return asked
    if asked or not heads:
        raise CaseError(
            f"This type has no such head: 'hf:{model_type}'. Got {asked or 'none'!r}, it has "
            f"{', '.join(heads) or 'none of ' + ', '.join(rules()['heads'])}. Choose another head "
            f"or write a case file around the model",
            slug="hf-no-head",
        )
    return heads[0]


def _class_names(head: str) -> Mapping[str, Any]:
    """Return transformers' own table `{type: class name}` of a head."""
    tables = importlib.import_module("transformers.models.auto.modeling_auto")
    table: Mapping[str, Any] = getattr(tables, rules()["heads"][head][1])
    return table


def _model_class(transformers: ModuleType, address: HfAddress) -> Any:
    """Return the class that the auto class would build."""
    name = _class_names(address.head)[address.model_type]
    return getattr(transformers, name if isinstance(name, str) else name[0])


def _configuration(transformers: ModuleType, address: HfAddress) -> Any:
    """Return the shrunk configuration with the address' fields over it."""
    small = _fields(transformers, address)
    where = f"hf:{address.head}/{address.model_type}"
    with UserCode("The shrunk configuration", path=where, slug="hf-refused"):
        return transformers.AutoConfig.for_model(address.model_type, **small)


def _fields(transformers: ModuleType, address: HfAddress) -> dict[str, Any]:
    """Return the fields that the configuration is given."""
    where = f"hf:{address.head}/{address.model_type}"
    with UserCode("The configuration", path=where, slug="hf-refused"):
        defaults = transformers.AutoConfig.for_model(address.model_type).to_dict()
    small = shrunk(defaults)
    if address.head in _NEEDS_START_TOKEN and defaults.get("decoder_start_token_id") is None:
        small["decoder_start_token_id"] = 1
    if address.head in (*_NEEDS_START_TOKEN, "seqcls") and defaults.get("pad_token_id") is None:
        small["pad_token_id"] = 0
    for name, value in address.fields.items():
        _set_field(small, defaults, name, value, where)
    return small


def _set_field(
    small: dict[str, Any], defaults: Mapping[str, Any], name: str, value: Any, where: str
) -> None:
    """Set one field, a nested one by its dotted name."""
    outer, _, inner = name.partition(".")
    if outer not in defaults:
        raise CaseError(
            f"Unknown configuration field: {where}. Got {outer!r}; "
            f"{choices_text(outer, defaults)}. Write ?field=value",
            slug="hf-unknown-field",
        )
    if inner:
        nested = small.setdefault(outer, {})
        _set_field(nested, defaults[outer] or {}, inner, value, f"{where}, {outer}")
    else:
        small[outer] = value


def _literal(text: str) -> Any:
    """Read `4`, `0.5`, `None`, `True` or a list; anything else is a string."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _transformers() -> ModuleType:
    """Import transformers, offline and quiet.

    Raises:
        CaseError: `hf-missing`.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    try:
        transformers = importlib.import_module("transformers")
    except ModuleNotFoundError as error:
        raise CaseError(
            "The package transformers is missing: hf: addresses need it. Install it: "
            "pip install 'spmd-verify[hf]'",
            slug="hf-missing",
        ) from error
    transformers.logging.set_verbosity_error()
    return transformers
