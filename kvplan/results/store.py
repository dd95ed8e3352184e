"""Results on disk: a run is a directory of Parquet files that is written whole or not at all.

Tables go to a hidden sibling first and are renamed into place, so a reader, or a kill at any moment, finds
whole files. All tables of a run carry one ``run_id`` in their metadata: `read_tables` refuses a mixture.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import sys
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvplan import __version__
from kvplan.errors import InputError

if TYPE_CHECKING:
    import pyarrow as pa

METADATA_KEY = b"kvplan"


def run_metadata(
    command: Sequence[str] | str,
    settings: Mapping[str, Any],
    provenance: Mapping[str, Any] | None = None,
    device: str = "none (modelled)",
) -> dict[str, Any]:
    """What a table needs to say where it comes from: command, settings, versions, trace, device, time."""
    versions = {"kvplan": __version__, "python": platform.python_version()}
    for name in ("numpy", "pyarrow", "numba", "torch", "triton"):
        if name in sys.modules:
            versions[name] = str(getattr(sys.modules[name], "__version__", "unknown"))
    return {
        "command": command if isinstance(command, str) else " ".join(command),
        "settings": dict(settings),
        "versions": versions,
        "provenance": dict(provenance or {}),
        "device": device,
        "platform": platform.platform(),
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def write_tables(
    directory: str | os.PathLike[str], tables: Mapping[str, pa.Table], metadata: Mapping[str, Any]
) -> list[Path]:
    """Write ``tables`` as ``directory/NAME.parquet`` and return their paths.

    A new directory appears in one rename. In one that is there, each file is replaced by a rename, a table
    of an earlier run that this run lacks is removed, and files that are not ours stay.
    Raises InputError (flag -o) when the place cannot be written.
    """
    target = Path(directory)
    if target.is_symlink():
        target = target.resolve()
    if target.exists() and not target.is_dir():
        raise InputError(f"-o {directory} is a file; name a directory.")
    run_id = uuid.uuid4().hex
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(target)
        partial = target.parent / f".{target.name}.{os.getpid()}-{run_id[:8]}.partial"
        partial.mkdir()
        try:
            for name, table in tables.items():
                _write(table, partial / f"{name}.parquet", {**metadata, "run_id": run_id})
            if target.exists():
                _replace_tables(partial, target, run_id)
            else:
                partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise InputError(f"-o {directory} cannot be written: {error.strerror or error}.") from error
    return [target / f"{name}.parquet" for name in tables]


def write_file(path: str | os.PathLike[str], table: pa.Table, metadata: Mapping[str, Any]) -> Path:
    """Write one table to ``path`` through a temporary sibling. Raises InputError (flag -o) on failure."""
    target = Path(path)
    if target.is_dir():
        raise InputError(f"-o {path} is a directory; name a file such as {path}/result.parquet.")
    run_id = uuid.uuid4().hex
    partial = target.with_name(f".{target.name}.{os.getpid()}-{run_id[:8]}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        try:
            _write(table, partial, {**metadata, "run_id": run_id})
            partial.replace(target)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise InputError(f"-o {path} cannot be written: {error.strerror or error}.") from error
    return target


def read_metadata(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The metadata of one of our Parquet files; empty for a file that is not ours."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        stored = pq.read_schema(path).metadata or {}
    except pa.ArrowInvalid:  # not Parquet at all
        return {}
    return dict(json.loads(stored.get(METADATA_KEY, b"{}")))


def read_tables(directory: str | os.PathLike[str], names: Sequence[str]) -> dict[str, pa.Table]:
    """Read tables of one run. Raises InputError when one is missing or they are of different runs."""
    import pyarrow.parquet as pq

    tables, runs = {}, set()
    for name in names:
        path = Path(directory) / f"{name}.parquet"
        if not path.is_file():
            raise InputError(f"{directory} has no {name}.parquet; write it with `-o {directory}`.")
        runs.add(read_metadata(path).get("run_id"))
        tables[name] = pq.ParquetFile(path).read()  # read_table would import pandas
    if len(runs) > 1:
        raise InputError(f"{directory} holds tables of different runs; run the command again.")
    return tables


def _write(table: pa.Table, path: Path, metadata: Mapping[str, Any]) -> None:
    import pyarrow.parquet as pq

    stored = {METADATA_KEY: json.dumps(metadata, default=str).encode()}
    pq.write_table(table.replace_schema_metadata(stored), path, compression="zstd")


def _replace_tables(partial: Path, target: Path, run_id: str) -> None:
    for file in sorted(partial.iterdir()):
        file.replace(target / file.name)
    for file in target.glob("*.parquet"):
        if read_metadata(file).get("run_id", run_id) != run_id:
            file.unlink()


def _remove_leftovers(target: Path) -> None:
    """Clear what a killed run left: siblings with our name pattern whose process is gone."""
    for leftover in target.parent.glob(f".{target.name}.*-*.partial"):
        pid = leftover.name.removeprefix(f".{target.name}.").partition("-")[0]
        if pid.isdigit() and leftover.is_dir() and not _alive(int(pid)):
            shutil.rmtree(leftover, ignore_errors=True)


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True
    return True
