"""`--resume RECORD`: cells of an earlier run that need not be run again. Torch-free."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from spmd_verify.record import Cell, Record, read
from spmd_verify.record_changes import CellKey, key_of

# Settings that make other numbers; what a cell's key holds is not among them.
_SETTINGS: Final = ("steps", "seed", "overrides", "resume_check", "probe", "runner")
HASHES: Final = "source_hashes"


class Earlier:
    """What a record has of the cells that are about to run."""

    def __init__(self, path: str, current: Record) -> None:
        """Read a record, if one is named.

        Args:
            path: Of the record; empty for none.
            current: The run that begins: its settings and tool must be the record's.

        Raises:
            UsageError: `record-unreadable`, `not-a-record`, `record-too-new`.
        """
        self.cells: dict[CellKey, Cell] = {}
        self.hashes: dict[str, object] = {}
        self.environment: dict[str, object] = {}
        self.why_not: str | None = None
        if path:
            self._take(read(path), path, current)

    def _take(self, record: Record, path: str, current: Record) -> None:
        """Keep what is worth keeping of a record."""
        differing = [
            name for name in _SETTINGS if record.settings.get(name) != current.settings.get(name)
        ]
        if record.tool != current.tool:
            differing.append("spmd-verify")
        if differing:
            self.why_not = f"{path}: other {', '.join(differing)}; every cell runs again"
            return
        self.environment = record.environment
        hashes = record.unknown.get(HASHES)
        self.hashes = hashes if isinstance(hashes, dict) else {}
        self.cells = {key_of(cell): cell for cell in record.cells if cell.verdict != "error"}

    def cell(
        self, key: CellKey, source_hash: str, environment: Mapping[str, object]
    ) -> Cell | None:
        """Return a cell that was judged with the same source on the same machine, else None."""
        is_same = self.hashes.get(key[0]) == source_hash and self.environment == environment
        return self.cells.get(key) if is_same else None
