"""Kernel tests run Triton's interpreter in this process; compile-only tests use a worker process.

`triton.jit` decides at decoration, also for triton's own library, so the mode must be set before triton is
first imported: here, while tests are collected. Tests elsewhere keep their environment.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import kvplan.kernels

HERE = Path(__file__).parent
HAVE_TRITON = all(importlib.util.find_spec(name) for name in ("torch", "triton"))
if HAVE_TRITON:
    before = os.environ.get("TRITON_INTERPRET")
    if "triton" in sys.modules and before != "1":
        raise RuntimeError(
            "triton was imported before tests/kernels/conftest.py could choose its interpreter"
        )
    os.environ["TRITON_INTERPRET"] = "1"
    for module in pkgutil.iter_modules(kvplan.kernels.__path__, "kvplan.kernels."):
        importlib.import_module(module.name)
    # Loaded by triton at a first launch otherwise, which may come from a test elsewhere, in the other mode.
    if importlib.util.find_spec("triton.experimental.gluon"):
        importlib.import_module("triton.experimental.gluon")

    if before is None:
        del os.environ["TRITON_INTERPRET"]
    else:
        os.environ["TRITON_INTERPRET"] = before


# What the compiler made of each launch, for the table that --full-compile prints.
FOUND: list[tuple[str, str, dict[str, Any]]] = []


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full-compile", action="store_true", help="compile every tuned kernel configuration")


@pytest.fixture(autouse=True)
def _interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", "1")


@pytest.fixture(scope="session")
def compile_kernels() -> Iterator[Callable[..., dict[str, Any]]]:
    """``compile_kernels(kernel=..., arch=..., ...)``: what the compiler made of that launch's kernels."""
    environment = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_DEFAULT_FP_FUSION": "1"}
    environment.setdefault("TRITON_CACHE_DIR", str(HERE.parents[1] / ".triton_cache"))
    worker = subprocess.Popen(
        [sys.executable, str(HERE / "compile_worker.py")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    )

    def ask(**request: Any) -> dict[str, Any]:
        worker.stdin.write(json.dumps(request) + "\n")
        worker.stdin.flush()
        reply = json.loads(worker.stdout.readline() or '{"error": "the compile worker ended"}')
        assert "error" not in reply, reply["error"]
        for kernel, found in reply.items():
            plain = ("kernel", "arch", "dtype", "kv_dtype")
            words = [str(value) if key in plain else f"{key}={value}" for key, value in request.items()]
            FOUND.append((" ".join(words), kernel, found))
        return reply

    yield ask
    worker.stdin.close()
    worker.wait(timeout=60)


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not FOUND or not config.getoption("--full-compile", default=False):
        return
    terminalreporter.section("compiled kernels")
    columns = f"{'regs':>6}{'stack B':>9}{'shared KiB':>12}{'16 B loads':>12}"
    columns += f"{'programs/SM':>13}{'KiB in flight/SM':>18}"
    terminalreporter.line(f"{'launch':64}{columns}  tensor core")
    for launch, kernel, found in FOUND:
        if kernel == "_combine_kernel":
            continue
        numbers = f"{found['registers']:6}{found['stack_bytes']:9}{found['shared_bytes'] / 1024:12.1f}"
        numbers += f"{found['loads']['16']:12}{found.get('programs_per_sm', '-'):>13}"
        numbers += f"{found['in_flight_bytes'] // 1024:18}" if "in_flight_bytes" in found else f"{'-':>18}"
        instructions = f"{found['tensor_core']} x {', '.join(found['mma']) or '-'}"
        terminalreporter.line(f"{launch:64}{numbers}  {instructions}")
