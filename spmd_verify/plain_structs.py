"""Structs to JSON and back, with keys that a class does not know and floats that JSON cannot say.

A struct with a field `unknown` keeps there what its class has no field for, and is written with
those keys merged in; a NaN or an infinity is written as a string. Each class is looked at once,
so that the rows of a record - 160,000 in a large one - cost a few steps each. Torch-free.
"""

import math
from functools import cache
from typing import Any, Final, TypeVar, get_args, get_origin, get_type_hints

import msgspec

AnyStruct = TypeVar("AnyStruct", bound=msgspec.Struct)
NON_FINITE: Final = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


class _Plan:
    """What of one struct class differs between a struct and its JSON.

    Attributes:
        names: Every field but `unknown`.
        floats: Fields that may hold a NaN or an infinity.
        structs: Fields that hold a struct, or lists of one, with the plan of its class.
        others: Fields of other containers of those, and of anything, with their annotation.
    """

    def __init__(self, kind: type[msgspec.Struct]) -> None:
        """Read the annotations of a class and, where it has any, of its members' classes."""
        hints = get_type_hints(kind)
        self.names = frozenset(kind.__struct_fields__) - {"unknown"}
        self.floats: list[str] = []
        self.structs: list[tuple[str, _Plan]] = []
        self.others: list[tuple[str, Any]] = []
        for name in kind.__struct_fields__:
            inner = _kinds_within(hints[name])
            members = [each for each in inner if issubclass(each, msgspec.Struct)]
            if name == "unknown":
                continue
            if dict in inner or object in inner or (list in inner and float in inner):
                self.others.append((name, hints[name]))
            elif members:
                self.structs.append((name, _plan(members[0])))
            elif float in inner:
                self.floats.append(name)


@cache
def _plan(kind: type[msgspec.Struct]) -> _Plan:
    """Return the plan of a class."""
    return _Plan(kind)


def _kinds_within(hint: Any) -> set[type]:
    """Return every class that an annotation names; `object` for Any."""
    if hint is Any:
        return {object}
    inner = {kind for each in get_args(hint) for kind in _kinds_within(each)}
    origin = get_origin(hint) or hint
    return inner | ({origin} if isinstance(origin, type) else set())


def to_plain(value: Any) -> Any:
    """Turn structs into dicts, unknown keys merged in, non-finite floats into strings."""
    if isinstance(value, msgspec.Struct):
        return _struct_to_plain(value, _plan(type(value)))
    if isinstance(value, dict):
        return {str(key): to_plain(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [to_plain(member) for member in value]
    if isinstance(value, float) and not math.isfinite(value):
        return _non_finite_text(value)
    return value


def _struct_to_plain(value: msgspec.Struct, plan: _Plan) -> dict[str, Any]:
    """Turn one struct into a dict; only fields that may differ are looked at."""
    plain = msgspec.structs.asdict(value)
    unknown = plain.pop("unknown", None)
    for name in plan.floats:
        number = plain[name]
        if number is not None and not math.isfinite(number):
            plain[name] = _non_finite_text(number)
    for name, inner in plan.structs:
        member = plain[name]
        if isinstance(member, list):
            plain[name] = [_struct_to_plain(each, inner) for each in member]
        elif member is not None:
            plain[name] = _struct_to_plain(member, inner)
    for name, _ in plan.others:
        plain[name] = to_plain(plain[name])
    if unknown:
        plain.update(to_plain(unknown))
    return plain


def _non_finite_text(value: float) -> str:
    """Return the string that stands for a NaN or an infinity."""
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


def from_plain(kind: type[AnyStruct], plain: Any) -> AnyStruct:
    """Make a struct from the JSON that `to_plain` gives; the reverse of it.

    Args:
        kind: Which struct.
        plain: Its JSON, not to be used afterwards: keys that the class does not have are moved
            into `unknown`, and the three strings become floats, in place.

    Raises:
        msgspec.ValidationError: Something has another type than it should, or is missing.
    """
    _sort_out(plain, _plan(kind))
    return msgspec.convert(plain, kind)


def _sort_out(plain: Any, plan: _Plan) -> None:
    """Make the JSON of a struct what `msgspec.convert` takes, in place, where it has its type."""
    if not isinstance(plain, dict):
        return
    if not plan.names.issuperset(plain):
        plain["unknown"] = {key: plain.pop(key) for key in [*plain] if key not in plan.names}
    for name in plan.floats:
        if isinstance(number := plain.get(name), str):
            plain[name] = NON_FINITE.get(number, number)
    for name, inner in plan.structs:
        member = plain.get(name)
        if isinstance(member, list):
            for each in member:
                _sort_out(each, inner)
        elif member is not None:
            _sort_out(member, inner)
    for name, hint in plan.others:
        if name in plain:
            plain[name] = _sorted_out(plain[name], hint)


def _sorted_out(plain: Any, hint: Any) -> Any:
    """Return JSON of any annotation as `msgspec.convert` takes it; containers in place."""
    members = [member for member in get_args(hint) if member is not type(None)]
    if hint is float and isinstance(plain, str):
        return NON_FINITE.get(plain, plain)
    if isinstance(hint, type) and issubclass(hint, msgspec.Struct):
        _sort_out(plain, _plan(hint))
    elif get_origin(hint) is dict and isinstance(plain, dict):
        for key, member in plain.items():
            plain[key] = _sorted_out(member, members[1])
    elif get_origin(hint) is list and isinstance(plain, list):
        plain[:] = [_sorted_out(member, members[0]) for member in plain]
    elif members and get_origin(hint) not in (dict, list):
        return _sorted_out(plain, members[0])  # `X | None`
    return plain
