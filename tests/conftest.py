"""Where tests find the material that lies beside the project (evidence, oracle, facts, traces)."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("KVPLAN_SHARED", Path(__file__).resolve().parents[2] / "shared"))


def shared_path(*parts: str) -> Path:
    """A path below ../shared; skips the test, with the reason, where that is absent (never in CI)."""
    path = SHARED.joinpath(*parts)
    if not path.exists():
        if os.environ.get("CI"):
            raise FileNotFoundError(f"CI must have {path}")
        pytest.skip(f"needs {'/'.join(('../shared', *parts))}, which is absent here")
    return path
