"""Compilation: one signature, a cache wherever something is writable, the same code without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvplan.sched import core, jit
from kvplan.sim.run import simulate, steps_clock
from kvplan.sim.steptime import clock_for
from kvplan.spec.catalogue import DEFAULT_GPU, DEFAULT_MODEL, find_gpu, find_model
from kvplan.spec.engine import EngineSettings
from kvplan.trace.generate import random_trace
from tests.sim.test_run import RULES

MODEL = find_model(DEFAULT_MODEL).spec


@pytest.mark.skipif(os.environ.get("NUMBA_DISABLE_JIT") == "1", reason="nothing is compiled")
def test_every_kind_of_run_compiles_one_signature() -> None:
    """Another exact type in rules, clock or state would compile the whole core again (several seconds)."""
    trace = random_trace(5, 40, 5, seed=0, request_rate=1.0)
    settings = EngineSettings(max_num_batched_tokens=2048, max_num_seqs=64)
    for rules in (RULES, RULES._replace(record=False, asynchronous=True, priority=True, max_concurrency=2)):
        for clock in (steps_clock(), clock_for(MODEL, find_gpu(DEFAULT_GPU), settings)):
            simulate(trace, rules, clock)

    assert len(core.run.signatures) == 1


def test_the_same_code_runs_without_compilation() -> None:
    """NUMBA_DISABLE_JIT=1, for debugging: the run is the same, with real IndexErrors."""
    script = (
        "from tests.sim.test_run import RULES; from kvplan.sim.run import simulate, steps_clock;"
        "from kvplan.trace.generate import random_trace;"
        "t = random_trace(30, 100, 20, seed=1, request_rate=1.0);"
        "r = simulate(t, RULES._replace(num_blocks=16), steps_clock());"
        "print(r.rows.sum(), r.items.sum(), int(r.count['preemptions']))"
    )

    def output(**environment: str) -> str:
        return subprocess.run(
            [sys.executable, "-c", script],
            capture_output=True,
            text=True,
            check=True,
            cwd=Path(__file__).parents[2],
            env={**os.environ, **environment},
        ).stdout

    plain, fast = output(NUMBA_DISABLE_JIT="1"), output()
    assert plain == fast
    assert int(plain.split()[-1]) > 0


def test_a_machine_where_nothing_is_writable_still_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jit, "_is_writable", lambda folder: False)
    monkeypatch.setenv("NUMBA_CACHE_DIR", "/nonexistent")
    assert jit._choose_cache_dir() is False
    assert "NUMBA_CACHE_DIR" not in os.environ, "numba would fall through to a folder that fails at import"


def test_the_cache_goes_to_the_users_folder_when_the_module_is_read_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.delenv("NUMBA_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(jit, "_is_writable", lambda folder: folder.is_relative_to(tmp_path))
    assert jit._choose_cache_dir() is True
    assert Path(os.environ["NUMBA_CACHE_DIR"]).is_relative_to(tmp_path)
    monkeypatch.delenv("NUMBA_CACHE_DIR")
