"""Start-up beside the least a Typer program can do: `make bench-start`. Prints ratios, asserts nothing.

The base is a program of three commands with no import but typer, as lean as ours (no Rich). The programs
take turns, so that a busy machine slows all alike; the figure is the median of the runs.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

BASE = """
import typer
app = typer.Typer(rich_markup_mode=None)
@app.command()
def one(name: str, size: int = 1) -> None: ...
@app.command()
def two(name: str, size: int = 1) -> None: ...
@app.command()
def three(name: str, size: int = 1) -> None: ...
app()
"""
RUNS = 15


def main() -> None:
    ours = "from kvplan.cli.app import entry; entry()"
    programs = {
        "three-command Typer --help": [sys.executable, "-c", BASE, "--help"],
        "kvplan --help": [sys.executable, "-c", ours, "--help"],
        "kvplan estimate": [sys.executable, "-c", ours, "estimate"],
    }
    times_s: dict[str, list[float]] = {name: [] for name in programs}
    for _ in range(RUNS):
        for name, command in programs.items():
            start = time.perf_counter()
            subprocess.run(command, stdout=subprocess.DEVNULL, check=True)
            times_s[name].append(time.perf_counter() - start)
    base_s = statistics.median(times_s["three-command Typer --help"])
    print(f"{'':28}  median ms  ratio")
    for name, taken in times_s.items():
        print(f"{name:28}  {statistics.median(taken) * 1e3:9.0f}  {statistics.median(taken) / base_s:5.2f}")


if __name__ == "__main__":
    main()
