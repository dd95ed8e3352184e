"""One command for a machine with a GPU: ``python -m kvplan.bench.gpu_check [--out DIR] [--seconds S]``.

In order: versions; correctness gates of the Triton kernels; the kernel sweep; the kernel's tuning; peers
where installed; a summary with every table last. Each part is a process of its own, so one that cannot be
imported, crashes or hangs costs only itself, and the summary names it. Plain allocations only; no clock or
mode of the GPU is changed; nothing is read outside the checkout and its Python. At most ten minutes.

Exit code: 0 all right; 1 a gate, a cell or a part failed; 2 no GPU here.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kvplan.bench.device import Device, detect
from kvplan.errors import InputError

TOTAL_SECONDS = 570.0
GATES_SHARE = 0.4  # of the time at most; what the gates leave goes to the sweep
SWEEP_SHARE = 0.55  # of what is left after the gates; then tuning, then peers
GRACE_SECONDS = 45.0  # from "begin no further cell" to the end of a sweep
OURS = ("--backend", "triton", "--backend", "triton plan")
PEERS = {"flashinfer": "flashinfer", "flash-attn": "flash_attn"}


@dataclass(frozen=True)
class Part:
    """How a part ended: "ok", or what went wrong in one line; ``text`` is its output, shown last."""

    name: str
    outcome: str
    text: str = ""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check; the return value is the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m kvplan.bench.gpu_check", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--out", type=Path, default=Path("out/gpu-check"), help="where the Parquet goes")
    parser.add_argument("--seconds", type=float, default=TOTAL_SECONDS, help="limit for everything together")
    parser.add_argument("--gates-only", metavar="FILE", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.gates_only:
        return _gates_part(options.gates_only)
    try:
        device = detect("cuda")
    except InputError:
        sys.stdout.write("gpu-check needs a CUDA device and torch built for it; there is none here.\n")
        return 2
    ends = time.monotonic() + options.seconds
    options.out.mkdir(parents=True, exist_ok=True)
    _say(f"{device.name}, {_versions_line(device)}")

    gates, gates_part = run_gates_part(options.out, options.seconds * GATES_SHARE)
    parts = [gates_part, write_gates(options.out / "gates", gates, device)]
    left = ends - time.monotonic()
    parts.append(run_sweep("kernel sweep", sweep_arguments(options.out), left * SWEEP_SHARE))
    peers = [name for name, module in PEERS.items() if _installed(module)]
    others = [("tuning", tuning_arguments(options.out))]
    others += [(f"peer {name}", peer_arguments(name, options.out)) for name in peers]
    for i, (name, arguments) in enumerate(others):
        parts.append(run_sweep(name, arguments, (ends - time.monotonic()) / (len(others) - i)))
    failed_gates = sum(not gate["passed"] for gate in gates)
    _say(summary_text(parts, gates, peers, device))
    return 1 if failed_gates or any(part.outcome != "ok" for part in parts) else 0


def sweep_arguments(out: Path) -> list[str]:
    """Arguments of ``kvplan bench`` for our kernel over the standard preset."""
    return ["--preset", "standard", *OURS, "-o", str(out / "kernel")]


def tuning_arguments(out: Path) -> list[str]:
    """One set-up of the targets with the kernel's tuning changed, one thing at a time."""
    return [
        *("--batch-size", "32", "--context-len", "8192", "--block-size", "16", "--ablate"),
        *("--backend", "triton", "-o", str(out / "tuning")),
    ]


def peer_arguments(name: str, out: Path) -> list[str]:
    """A peer with our kernels beside it, on the cells round the preset's centre."""
    blocks = ["256"] if name == "flash-attn" else ["16", "64"]
    flags = [flag for block in blocks for flag in ("--block-size", block)]
    return [
        *("--preset", "standard", "--batch-size", "32", "--context-len", "8192"),
        *(*OURS, "--backend", name, *flags, "-o", str(out / name)),
    ]


def run_sweep(name: str, arguments: Sequence[str], seconds: float) -> Part:
    """Run ``kvplan bench`` on the GPU in a process of its own, within ``seconds``."""
    _say(f"\n{name}: up to {seconds:.0f} s")
    if seconds < GRACE_SECONDS + 10:
        return Part(name, "not begun: no time left")
    command = [sys.executable, "-m", "kvplan", "bench", "--device", "cuda"]
    command += ["--max-seconds", f"{seconds - GRACE_SECONDS:.0f}", *arguments]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=seconds, env=_environment(), check=False
        )
    except subprocess.TimeoutExpired:
        return Part(name, f"stopped after {seconds:.0f} s")
    if done.returncode == 0:
        return Part(name, "ok", done.stdout)
    errors = [line for line in done.stderr.splitlines() if line.strip()]
    found = next((line for line in errors if line.startswith("error:")), errors[-1] if errors else "")
    reason = "a result of ours is wrong" if done.returncode == 1 and done.stdout else found
    return Part(name, f"exit code {done.returncode}: {reason}", done.stdout)


def run_gates_part(out: Path, seconds: float) -> tuple[list[dict[str, Any]], Part]:
    """Run the gates in a process of its own; results that it wrote before it ended early are kept."""
    found = out / "gates.jsonl"
    found.unlink(missing_ok=True)
    _say(f"\ngates: up to {seconds:.0f} s")
    outcome = "ok"
    command = [sys.executable, "-m", "kvplan.bench.gpu_check", "--gates-only", str(found)]
    try:
        code = subprocess.run(command, timeout=seconds, env=_environment(), check=False).returncode
        if code not in (0, 1):
            outcome = f"ended early with exit code {code}"
    except subprocess.TimeoutExpired:
        outcome = f"stopped after {seconds:.0f} s"
    gates = [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []
    if outcome == "ok" and not gates:
        outcome = "no gate was run"
    return gates, Part("gates", outcome)


def _gates_part(found: Path) -> int:
    """The child: one gate after the other, each result on disk before the next begins."""
    from kvplan.bench import gates

    passed = True
    with found.open("w") as file:
        for result in gates.run_gates("triton", "cuda"):
            file.write(json.dumps(asdict(result)) + "\n")
            file.flush()
            _say(gate_line(asdict(result)))
            passed = passed and result.passed
    return 0 if passed else 1


def gate_line(gate: dict[str, Any]) -> str:
    """'ok    2.1e-03  decode bf16, block 16, group 4, d 128', or FAIL and why."""
    error = "-" if gate["error"] is None else f"{gate['error']:.1e}"
    word = "ok" if gate["passed"] else "FAIL"
    why = f": {gate['reason']}" if gate["reason"] else ""
    return f"  {word:<4}  {error:>7}  {gate['gate']}{why}"


def write_gates(directory: Path, gates: Sequence[dict[str, Any]], device: Device) -> Part:
    """Write gates.parquet; a failure is a part's outcome, not the end of the check."""
    if not gates:
        return Part("gates.parquet", "nothing to write")
    try:
        from kvplan.bench.summary import typed
        from kvplan.results.store import run_metadata, write_tables

        rows = [{**gate, "device": device.name, "device_label": device.label} for gate in gates]
        metadata = run_metadata("python -m kvplan.bench.gpu_check", {}, device=device.described)
        write_tables(directory, {"gates": typed(rows)}, {**metadata, "device_details": device.as_dict()})
    except (ImportError, InputError) as error:
        return Part("gates.parquet", f"{type(error).__name__}: {error}")
    return Part("gates.parquet", "ok")


def summary_text(
    parts: Sequence[Part], gates: Sequence[dict[str, Any]], peers: Sequence[str], device: Device
) -> str:
    """What a reader copies: each part's outcome, the failed gates, then the tables."""
    passed = sum(gate["passed"] for gate in gates)
    lines = ["", "=" * 78, f"GPU CHECK  {device.name}: {passed} of {len(gates)} gates passed", ""]
    lines += [_versions_line(device), ""]
    lines += [f"  {part.name:<16}  {part.outcome}" for part in parts]
    lines += [f"  {f'peer {name}':<16}  not installed" for name in PEERS if name not in peers]
    failed = [gate_line(gate) for gate in gates if not gate["passed"]]
    lines += ["", *failed] if failed else []
    for part in parts:
        if part.text.strip():
            lines += ["", f"{part.name}:", part.text.rstrip()]
    return "\n".join(lines)


def _versions_line(device: Device) -> str:
    return ", ".join(f"{name} {version}" for name, version in device.versions.items())


def _installed(module: str) -> bool:
    from importlib.util import find_spec

    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def _environment() -> dict[str, str]:
    """Children keep Triton's cache in the checkout, share it, and never meet the interpreter."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment.setdefault("TRITON_CACHE_DIR", str(Path(".triton_cache").resolve()))
    return environment


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
