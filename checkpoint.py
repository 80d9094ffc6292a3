"""Folders that are complete or not there: written beside, sealed by a manifest, renamed into place, verified before use.

    checkpoint-20/               committed: every file is in manifest.json with its size and SHA-256
    _checkpoint-30.partial/      a save in progress, or one that was interrupted; never resumed from, removed by the next

Nothing in this file knows what is in the files. It needs no torch and talks to no other rank.
"""

import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path

MANIFEST = "manifest.json"
_locked: dict[Path, int] = {}  # folders that this process keeps for itself, and what holds them


def partial_of(folder: Path) -> Path:
    """Where a folder is written before it is committed. The Hub's uploads leave names that start with `_` out."""
    return folder.with_name(f"_{folder.name}.partial")


def begin(partial: Path) -> None:
    """Make an empty folder to write into. What an interrupted save left there is removed.

    Raises:
        OSError: it cannot be made.
    """
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


def sweep(output_dir: str | Path) -> None:
    """Remove what interrupted saves and deletions have left behind. Not while another run writes there."""
    for pattern in ("_checkpoint-*.partial", "_checkpoint-*.deleted", "_checkpoint-*.replaced", "_final.partial"):
        for path in Path(output_dir).glob(pattern):
            shutil.rmtree(path, ignore_errors=True)


def commit(partial: Path, folder: Path, about: dict | None = None) -> None:
    """Make what was written into `partial` durable and put it in place as `folder`, all of it at once.

    The manifest is written last: a folder without one, or that does not agree with it, was not committed. A folder that is
    already there (a damaged checkpoint of the same step) goes only when the new one is complete.

    Args:
        about: more entries for the manifest, JSON values.

    Raises:
        OSError: out of space, or not writable. `folder` is then as it was.
    """
    files = {}
    for path in sorted(path for path in partial.rglob("*") if path.is_file()):
        _fsync(path)
        files[path.relative_to(partial).as_posix()] = {"bytes": path.stat().st_size, "sha256": sha256_of(path)}
    manifest = (about or {}) | {"files": files}
    manifest["seal"] = _seal(manifest)
    with open(partial / MANIFEST, "w", encoding="utf-8") as file:
        json.dump(manifest, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    for path in (path for path in partial.rglob("*") if path.is_dir()):
        _fsync(path)
    _fsync(partial)
    replaced = _out_of_sight(folder, "replaced") if folder.exists() else None
    try:
        os.rename(partial, folder)
    except OSError:
        if replaced is not None:
            os.rename(replaced, folder)
        raise
    _fsync(folder.parent)
    if replaced is not None:
        shutil.rmtree(replaced, ignore_errors=True)


def recover(output_dir: str | Path) -> None:
    """Finish replacements that were interrupted between their two renames. Before looking for checkpoints."""
    for replaced in Path(output_dir).glob("_checkpoint-*.replaced"):
        folder = replaced.with_name(replaced.name[1:].removesuffix(".replaced"))
        if not folder.exists():
            whole = problem_with(partial_of(folder)) is None
            os.rename(partial_of(folder) if whole else replaced, folder)


def lock(output_dir: str | Path) -> None:
    """Keep a second run out of an output folder until this process ends, however it does. Asked again, it has it already.

    Raises:
        ValueError: another process has it.
    """
    folder = Path(output_dir).resolve()
    if folder in _locked:
        return
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise ValueError(f"--output_dir {output_dir}: another run is writing there; wait for it, or name another") from None
    except OSError:  # a file system without locks
        pass
    # A child that outlives its process, such as a data loader's worker of a rank that was killed, must not keep the lock.
    _locked[folder] = descriptor
    os.register_at_fork(after_in_child=lambda: folder in _locked and os.close(_locked.pop(folder)))


def move_into(partial: Path, folder: Path) -> None:
    """Move the files of `partial` into a folder that may hold others, each at once. It gets no manifest."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(path for path in partial.rglob("*") if path.is_file()):
        _fsync(path)
        place = folder / path.relative_to(partial)
        place.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, place)
    _fsync(folder)
    shutil.rmtree(partial)


def manifest_of(folder: Path) -> dict | None:
    """The manifest of a committed folder; None if there is none or it does not agree with its own seal."""
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        return manifest if manifest.pop("seal") == _seal(manifest) else None
    except (OSError, ValueError, KeyError, AttributeError, TypeError):
        return None


def problem_with(folder: Path) -> str | None:
    """Why a folder cannot be trusted, in a few words that name the file; None if every byte is as it was committed."""
    if not (folder / MANIFEST).is_file():
        return f"no {MANIFEST}: its save was interrupted, or another program wrote it"
    manifest = manifest_of(folder)
    if manifest is None:
        return f"{MANIFEST} is damaged"
    for name, entry in manifest["files"].items():
        try:
            size = (folder / name).stat().st_size
            if size != entry["bytes"]:
                return f"{name} has {size} bytes, not {entry['bytes']}"
            if sha256_of(folder / name) != entry["sha256"]:
                return f"{name} is damaged (its SHA-256 differs from {MANIFEST})"
        except FileNotFoundError:
            return f"{name} is missing"
        except OSError as error:
            return f"{name} cannot be read ({error.strerror})"
    return None


def numbered(output_dir: str | Path) -> list[tuple[int, Path]]:
    """(N, path) of every folder named checkpoint-N, in order of N."""
    found = ((re.fullmatch(r"checkpoint-(\d+)", path.name), path) for path in Path(output_dir).glob("checkpoint-*"))
    return sorted((int(match[1]), path) for match, path in found if match and path.is_dir())


def rotate(output_dir: str | Path, keep: int, protected: Iterable[str | Path] = ()) -> list[str]:
    """Delete the lowest-numbered committed checkpoints until `keep` are left; never the highest, nor what is protected.

    A folder that has no manifest is not ours to delete. A deletion first takes the folder out of sight, so that no half of a
    checkpoint stays under its name.

    Returns:
        One line for each checkpoint that could not be deleted.
    """
    folders = [path for _, path in numbered(output_dir) if manifest_of(path) is not None]
    kept = {Path(path).resolve() for path in (*protected, *folders[-1:])}
    deletable = [path for path in folders if path.resolve() not in kept]
    failures = []
    for path in deletable[: max(len(folders) - keep, 0)]:
        try:
            hidden = _out_of_sight(path, "deleted")
            hidden.unlink() if hidden.is_symlink() else shutil.rmtree(hidden)
        except OSError as error:
            failures.append(f"{path} could not be deleted ({error.strerror}); it takes up space, training goes on")
    return failures


def sha256_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _out_of_sight(folder: Path, why: str) -> Path:
    hidden = folder.with_name(f"_{folder.name}.{why}")
    if hidden.exists():
        shutil.rmtree(hidden)
    os.rename(folder, hidden)
    return hidden


def _seal(manifest: dict) -> str:
    return hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest()


def _fsync(path: Path) -> None:
    # A folder too: its entries, such as a rename, are as volatile as a file's bytes.
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
