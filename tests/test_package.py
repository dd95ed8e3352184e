"""The package as a user gets it: quick help, commands that all work, and archives that hold every file."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import kvplan
from kvplan.cli.app import COMMANDS, main

ROOT = Path(__file__).resolve().parents[1]
HEAVY = ("numba", "numpy", "pandas", "pyarrow", "rich", "torch", "triton", "matplotlib")


def heavy_modules(*argv: str) -> set[str]:
    """Which of HEAVY one command imports, in a process of its own."""
    code = (
        "import json, sys\n"
        "from kvplan.cli.app import main\n"
        "code = main(sys.argv[1:])\n"
        f"found = [m for m in {HEAVY!r} if m in sys.modules]\n"
        "sys.stderr.write('\\n' + json.dumps([code, found]))\n"
    )
    run = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
    code_out, found = json.loads(run.stderr.splitlines()[-1])
    assert code_out in (0, 1), run.stderr
    return set(found)


@pytest.mark.parametrize("argv", [["--help"], [], ["--version"]])
def test_help_imports_nothing_heavy(argv: list[str]) -> None:
    assert heavy_modules(*argv) == set()


def test_estimate_imports_nothing_heavy() -> None:
    """`estimate` imports none of torch, numba, pandas or, without -o, pyarrow (ARCHITECTURE.md)."""
    assert heavy_modules("estimate", "--format", "json") & {"torch", "numba", "pandas", "pyarrow"} == set()


def test_bare_command_is_help_and_exit_0(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    with_flag = capsys.readouterr()
    assert main([]) == 0
    bare = capsys.readouterr()
    assert bare.out.strip() == with_flag.out.strip()
    assert "Usage: kvplan COMMAND" in bare.out
    assert bare.err == ""
    assert max(map(len, bare.out.splitlines())) <= 80


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_in_help_has_help(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """`--help` lists only commands that work."""
    assert main([command, "--help"]) == 0
    assert command in capsys.readouterr().out


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["estimat"], "no command 'estimat'. Did you mean estimate?"),
        (["xyzzy"], "no command 'xyzzy'."),
        (["--nope"], "--nope"),
    ],
)
def test_misspelt_command_is_one_line_and_exit_2(
    argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(argv) == 2
    first, hint = capsys.readouterr().err.splitlines()
    assert first.startswith("error: ")
    assert says in first
    assert hint == "  See: kvplan --help"


def test_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvplan {kvplan.__version__}\n"


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> tuple[set[str], set[str]]:
    """Names in the wheel and in the sdist (without its first folder), built from a copy of the sources."""
    pytest.importorskip("setuptools")
    source = tmp_path_factory.mktemp("source") / "kvplan"
    ignore = shutil.ignore_patterns(
        ".git", ".venv", "out", "build", "dist", "*.egg-info", "__pycache__", ".*_cache"
    )
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignore)
    code = "import setuptools.build_meta as b; print(b.build_sdist('dist')); print(b.build_wheel('dist'))"
    run = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, check=True)
    sdist, wheel = (
        source / "dist" / name for name in run.stdout.splitlines() if name.endswith((".gz", ".whl"))
    )
    with tarfile.open(sdist) as tar:
        in_sdist = {name.partition("/")[2] for name in tar.getnames()}
    with zipfile.ZipFile(wheel) as zipped:
        return set(zipped.namelist()), in_sdist


def sources() -> set[str]:
    """Python and data files of the package under the names by which they are imported."""
    found = {p.relative_to(ROOT).as_posix() for p in (ROOT / "kvplan").rglob("*.py")}
    found |= {f"kvplan/kernels/{p.name}" for p in (ROOT / "kernels").glob("*.py")}
    found |= {p.relative_to(ROOT).as_posix() for p in (ROOT / "kvplan").glob("*/data/*.*")}
    return found | {"kvplan/py.typed"}


def test_wheel_holds_the_package_kernels_and_data(archives: tuple[set[str], set[str]]) -> None:
    """kvplan/kernels is a link to kernels/; a wheel must hold the files themselves."""
    wheel, _ = archives
    assert sources() - wheel == set()
    assert {name for name in wheel if name.startswith(("kernels/", "tests/"))} == set()


def test_sdist_builds_and_tests_without_the_repository(archives: tuple[set[str], set[str]]) -> None:
    _, sdist = archives
    needed = {
        "pyproject.toml",
        "Makefile",
        "README.md",
        "LICENSE",
        "CHANGELOG.md",
        "constraints.txt",
        ".ci/run",
    }
    tests = {p.relative_to(ROOT).as_posix() for p in (ROOT / "tests").rglob("*.py")}
    assert (sources() | needed | tests) - sdist == set()


def test_every_package_folder_is_listed() -> None:
    """pyproject's plain package list is what makes the link work; a forgotten folder would not be shipped."""
    config = tomllib.loads((ROOT / "pyproject.toml").read_text())
    folders = {p.parent.relative_to(ROOT) for p in (ROOT / "kvplan").rglob("__init__.py")} | {
        Path("kvplan/kernels")
    }
    assert {".".join(folder.parts) for folder in folders} == set(config["tool"]["setuptools"]["packages"])
