"""Read a safetensors file as views of one memory map.

`safetensors.safe_open` makes a storage, a slice and two views per tensor, which costs as much
as comparing a small tensor does. Format: https://github.com/huggingface/safetensors#format.
"""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Final

import msgspec
import torch
from torch import Tensor

_DTYPES: Final[dict[str, torch.dtype]] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U64": torch.uint64,
    "U32": torch.uint32,
    "U16": torch.uint16,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_LENGTH_BYTES: Final = 8


class _Place(msgspec.Struct):
    """Where a tensor is, in bytes after the header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


class MappedTensors:
    """The tensors of one file. They share its pages: copy before writing into one."""

    def __init__(self, path: Path) -> None:
        """Map a file.

        Raises:
            ValueError: It is no safetensors file.
        """
        with path.open("rb") as stream:
            length = int.from_bytes(stream.read(_LENGTH_BYTES), "little")
            header = msgspec.json.decode(stream.read(length), type=dict[str, msgspec.Raw])
            # Private pages: torch warns about memory that it must not write to.
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_COPY)
        header.pop("__metadata__", None)
        self._start = _LENGTH_BYTES + length
        self._places = {key: msgspec.json.decode(raw, type=_Place) for key, raw in header.items()}

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def tensor(self, key: str) -> Tensor:
        """Return a tensor as a view of the file."""
        place = self._places[key]
        dtype = _DTYPES[place.dtype]
        begin, end = place.data_offsets
        if begin == end:
            return torch.empty(place.shape, dtype=dtype)
        count = (end - begin) // dtype.itemsize
        flat = torch.frombuffer(self._map, dtype=dtype, count=count, offset=self._start + begin)
        return flat.view(place.shape)
