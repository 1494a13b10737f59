"""Stored references, kept between runs: a folder of entries, one folder each. Torch-free.

An entry is a copy of a store (see `store`) and a manifest with the size and the digest of
every file. It is written under another name and renamed, so that writers at once never mix
and a reader never sees half an entry. What cannot be read or written is a note, never an
error: the reference is then made as if there were no cache. Design: docs/cache.md.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Final

import msgspec

FOLDER: Final = "spmd-verify"
MANIFEST: Final = "manifest.json"
# About 40 references of a 10 million parameter model over 3 steps.
LIMIT_BYTES: Final = 2 << 30
# Folders under another name: being written or removed; older ones are left-overs of a kill.
_TEMPORARY: Final = ".tmp-"
_ABANDONED_SECONDS: Final = 3600.0
_DIGEST_BYTES: Final = 20


class Manifest(msgspec.Struct, kw_only=True):
    """What an entry holds.

    Attributes:
        files: Size in bytes and digest by file name.
        told: What making the reference told.
    """

    files: dict[str, tuple[int, str]]
    told: bytes


class Damaged(Exception):
    """An entry is not what was written; says in which way."""


def cache_folder(environment: Mapping[str, str] | None = None) -> str:
    """Return the folder of the cache: below `$XDG_CACHE_HOME`, else below `~/.cache`.

    A relative `$XDG_CACHE_HOME` counts as none, as its specification asks.

    Args:
        environment: `os.environ` when left out.
    """
    known = os.environ if environment is None else environment
    base = known.get("XDG_CACHE_HOME", "")
    if not os.path.isabs(base):
        base = os.path.join(os.path.expanduser("~"), ".cache")
    return os.path.join(base, FOLDER)


class ReferenceCache:
    """The entries in one folder.

    Attributes:
        remarks: What went wrong and was worked around, in the order it happened.
    """

    def __init__(self, folder: str | Path, limit_bytes: int = LIMIT_BYTES) -> None:
        """Use a folder, which need not exist.

        Args:
            folder: Where entries are.
            limit_bytes: Size of all entries together, above which the least recently used
                are removed.
        """
        self.folder = Path(folder)
        self.limit_bytes = limit_bytes
        self.remarks: list[str] = []

    def take(self, key: str, destination: Path) -> bytes | None:
        """Put a stored reference at `destination` and return what making it told.

        Args:
            key: Name of the entry.
            destination: Folder that does not exist, or is empty.

        Returns:
            None where there is no entry, or none that is whole: a damaged one is removed.
        """
        entry = self.folder / key
        try:
            manifest = _read_manifest(entry / MANIFEST)
            destination.mkdir(parents=True, exist_ok=True)
            for name in manifest.files:
                _link(entry / name, destination / name)
            _check(destination, manifest)
            os.utime(entry / MANIFEST)
        except FileNotFoundError:
            # No entry, one that is being removed, or one that has lost a file.
            if entry.exists():
                self._drop(key, "a file is missing")
        except Damaged as damage:
            self._drop(key, str(damage))
        except OSError as error:
            self.remarks.append(f"the reference cache was not read: {_reason(error)}")
        else:
            return manifest.told
        shutil.rmtree(destination, ignore_errors=True)
        return None

    def put(self, key: str, source: Path, told: bytes) -> None:
        """Keep the store at `source`, and remove what is then too much.

        Args:
            key: Name of the entry; one that is there is left alone.
            source: A complete store, not written to any more.
            told: What making it told.
        """
        temporary: Path | None = None
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY, dir=self.folder))
            files: dict[str, tuple[int, str]] = {}
            for path in sorted(source.iterdir()):
                _link(path, temporary / path.name)
                files[path.name] = _size_and_digest(temporary / path.name)
            if (size := sum(size for size, _ in files.values())) > self.limit_bytes:
                self.remarks.append(
                    f"the reference was not kept: its {size} bytes exceed the cache's "
                    f"{self.limit_bytes}"
                )
                return
            _write_manifest(temporary / MANIFEST, Manifest(files=files, told=told))
            with contextlib.suppress(FileExistsError, OSError):
                # Fails where another run was faster: both wrote the same.
                os.rename(temporary, self.folder / key)
            self._shrink(kept=key)
        except OSError as error:
            self.remarks.append(f"the reference was not kept for later runs: {_reason(error)}")
        finally:
            if temporary is not None:
                shutil.rmtree(temporary, ignore_errors=True)

    def remove(self, key: str) -> None:
        """Remove an entry; readers see all of it or nothing."""
        with contextlib.suppress(OSError):
            doomed = tempfile.mkdtemp(prefix=_TEMPORARY, dir=self.folder)
            os.rename(self.folder / key, os.path.join(doomed, key))
            shutil.rmtree(doomed, ignore_errors=True)

    def _drop(self, key: str, why: str) -> None:
        """Remove a damaged entry and say so."""
        self.remove(key)
        self.remarks.append(f"the cached reference was damaged ({why}) and is made anew")

    def _shrink(self, kept: str) -> None:
        """Remove the least recently used entries above the limit, and left-overs of kills."""
        sizes: dict[str, int] = {}
        used: dict[str, float] = {}
        for name, seconds in _entries(self.folder):
            if name.startswith(_TEMPORARY):
                if time.time() - seconds > _ABANDONED_SECONDS:
                    shutil.rmtree(self.folder / name, ignore_errors=True)
            else:
                used[name] = seconds
                sizes[name] = _bytes_of(self.folder / name)
        total = sum(sizes.values())
        for name in sorted(used, key=lambda name: used[name]):
            if total <= self.limit_bytes:
                break
            if name != kept:
                self.remove(name)
                total -= sizes[name]


def _entries(folder: Path) -> Iterator[tuple[str, float]]:
    """Give the name of every folder of the cache and when it was used last."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):
            marker = path / MANIFEST
            yield path.name, (marker if marker.exists() else path).stat().st_mtime


def _bytes_of(folder: Path) -> int:
    """Return the size of the files in a folder; what vanishes meanwhile counts nothing."""
    total = 0
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            with contextlib.suppress(OSError):
                total += path.stat().st_size
    return total


def _link(source: Path, destination: Path) -> None:
    """Give a file another name, or copy it where that is not possible.

    Files of a store are replaced, never written to, so that both names may share them.
    """
    try:
        os.link(source, destination)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copyfile(source, destination)


def _check(folder: Path, manifest: Manifest) -> None:
    """Compare files with what was written.

    Raises:
        Damaged: Naming the first file that differs.
    """
    for name, (size, digest) in manifest.files.items():
        found = (folder / name).stat().st_size
        if found != size:
            raise Damaged(f"{name} has {found} bytes instead of {size}")
        if _size_and_digest(folder / name)[1] != digest:
            raise Damaged(f"{name} has other content than was written")


def _size_and_digest(path: Path) -> tuple[int, str]:
    """Return the size of a file in bytes and the digest of its content."""
    digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
        return stream.tell(), digest.hexdigest()


def _write_manifest(path: Path, manifest: Manifest) -> None:
    """Write a manifest below the digest of itself."""
    content = msgspec.json.encode(manifest)
    digest = hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest()
    path.write_bytes(digest.encode() + b"\n" + content)


def _read_manifest(path: Path) -> Manifest:
    """Read a manifest.

    Raises:
        Damaged: It is not as it was written.
    """
    digest, _, content = path.read_bytes().partition(b"\n")
    if hashlib.blake2b(content, digest_size=_DIGEST_BYTES).hexdigest().encode() != digest:
        raise Damaged(f"{path.name} has other content than was written")
    try:
        return msgspec.json.decode(content, type=Manifest)
    except msgspec.MsgspecError as error:
        raise Damaged(f"{path.name} cannot be read") from error


def _reason(error: OSError) -> str:
    """Return file and reason of an error."""
    return f"{error.filename}: {error.strerror}"
