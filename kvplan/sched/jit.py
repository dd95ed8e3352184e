"""The one place where functions are compiled: where the cache goes, and the switch for bounds checks."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

BOUNDSCHECK = os.environ.get("KVPLAN_BOUNDSCHECK", "0") == "1"
"""Tests set KVPLAN_BOUNDSCHECK=1: an index out of range is then an IndexError, not a corrupted heap."""


def _is_writable(folder: Path) -> bool:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _choose_cache_dir() -> bool:
    """Make sure that numba finds a writable place for its cache; False when there is none.

    Numba looks beside the module, then in the user's cache folder, and fails at import when neither can
    be written. A NUMBA_CACHE_DIR must be set before numba is imported.
    """
    given = os.environ.get("NUMBA_CACHE_DIR")
    if given and _is_writable(Path(given)):
        return True
    if _is_writable(Path(__file__).parent / "__pycache__"):
        os.environ.pop("NUMBA_CACHE_DIR", None)
        return True
    candidates = [Path(tempfile.gettempdir()) / f"kvplan-numba-{os.getuid()}"]
    home = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    if os.path.isabs(home):
        candidates.insert(0, Path(home) / "kvplan" / "numba")
    for folder in candidates:
        if _is_writable(folder):
            os.environ["NUMBA_CACHE_DIR"] = str(folder)
            return True
    os.environ.pop("NUMBA_CACHE_DIR", None)
    return False


_CACHED = _choose_cache_dir()

import numba  # noqa: E402  (the cache folder has to be known first)


def compiled(function: Callable[..., Any]) -> Any:
    """Compile for one signature, without the interpreter lock, cached on disk where possible.

    Arrays are borrowed, never counted: every one belongs to the Python caller for the whole call. Counting
    references of the State's arrays at each call took a third of a run. Such code cannot make arrays.
    """
    return _jit(function, _nrt=False)


def compiled_with_arrays(function: Callable[..., Any]) -> Any:
    """The same for functions that make arrays of their own."""
    return _jit(function)


def _jit(function: Callable[..., Any], **options: bool) -> Any:
    cache = _CACHED and not BOUNDSCHECK
    njit: Any = numba.njit  # numba's own types leave out _nrt
    return njit(cache=cache, nogil=True, boundscheck=BOUNDSCHECK, **options)(function)


def is_compiled(dispatcher: Any) -> bool:
    """Whether a first call will be quick: compiled in this process, or found in the disk cache."""
    if not hasattr(dispatcher, "signatures"):  # NUMBA_DISABLE_JIT=1: plain Python
        return True
    if dispatcher.signatures:
        return True
    index = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    return index is not None and os.path.exists(index._index_path)
