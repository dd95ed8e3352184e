"""`kvplan bench` as a user meets it: label, exit codes, JSON keys, files, and one line for each fault."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from kvplan.bench import backends  # noqa: E402
from kvplan.bench.backends import Backend  # noqa: E402
from kvplan.cli.app import main  # noqa: E402
from kvplan.kernels import reference  # noqa: E402
from kvplan.results.store import read_metadata, read_tables  # noqa: E402

SMALL = [
    *("--device", "cpu", "--batch-size", "2", "--context-len", "64"),
    *("--heads", "4", "--kv-heads", "2", "--head-dim", "32"),
]
ROW_KEYS = {
    *("setup", "backend", "role", "block_size", "batch_size", "context_len", "lengths", "heads", "kv_heads"),
    *("head_dim", "dtype", "kv_cache_dtype", "table", "kv_bytes", "kv_under_4x_cache", "status", "reason"),
    *("max_error", "tolerance", "timing", "median_ms", "p20_ms", "p80_ms", "repeats", "eager_median_ms"),
    *("copies", "kv_gb_per_s", "share_of_read", "share_of_copy", "slowdown_vs_one_block"),
    *("slowdown_vs_sdpa", "device", "device_label"),
}


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny matrices on several threads mostly wait for each other."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def wrong_backend() -> Iterator[str]:
    """A backend whose every output is 1 % off: registered as any other, so the whole path is real."""

    def prepare(paged: Any) -> Any:
        arguments = (paged.q, paged.k_cache, paged.v_cache, paged.block_table, paged.seq_lens)
        return lambda: 1.01 * reference.paged_decode(*arguments)

    backends.register(Backend("one-percent-off", "kernel", ("cpu",), prepare))
    yield "one-percent-off"
    backends.unregister("one-percent-off")


def test_json_keys_are_the_contract_and_the_label_is_in_every_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """CLI.md: {"device","ceilings","kernel":[...],"serve":[...],"checks":[...]}; -o kernel and summary."""
    out = tmp_path / "run"
    assert main(["bench", *SMALL, "--block-size", "16", "--format", "json", "-o", str(out)]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert list(found) == ["device", "ceilings", "kernel", "serve", "checks"]
    assert found["serve"] == []
    assert found["device"]["kind"] == "cpu"
    assert found["device"]["is_gpu"] is False
    assert found["device"]["label"] == "CPU RUN, not a GPU figure"
    assert found["ceilings"]["read_gb_per_s"] > 0
    assert all(set(row) == ROW_KEYS for row in found["kernel"])
    assert {row["device_label"] for row in found["kernel"]} == {"CPU RUN, not a GPU figure"}
    assert [row["block_size"] for row in found["kernel"]] == [
        16,
        64,
        None,
        16,
    ]  # own, one block, SDPA, gather
    assert len(found["checks"]) == len(found["kernel"]) == 4
    assert all(check["passed"] and check["error"] <= check["tolerance"] for check in found["checks"])
    assert captured.err.startswith(f"wrote {out}: kernel, summary (")

    tables = read_tables(out, ["kernel", "summary"])
    assert tables["kernel"].num_rows == 4
    assert set(tables["kernel"].column_names) == ROW_KEYS
    assert tables["summary"].column("ok").to_pylist() == [1] * 4
    for name in tables:
        metadata = read_metadata(out / f"{name}.parquet")
        assert metadata["device"].startswith("CPU RUN, not a GPU figure: ")
        assert metadata["device_details"]["is_gpu"] is False
        assert metadata["versions"]["torch"] == torch.__version__
        assert metadata["settings"]["ceilings"] == found["ceilings"]
        assert metadata["provenance"]["kind"] == "constructed"


def test_the_first_line_is_the_label_and_lines_fit_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    """UX.md, bench on a CPU: the label is the answer."""
    assert main(["bench", *SMALL, "--block-size", "16", "--block-size", "64"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("CPU RUN  not a GPU figure: numba kernel, ")
    assert lines[2].startswith("Read ceiling ")
    assert "2 x 64 tokens, 4/2 heads x 32, fp32" in " ".join(lines[2:4])
    head = next(line for line in lines if line.startswith("  block"))
    assert head.split()[:4] == ["block", "table", "ms", "KV"]
    labels = [line.strip().split("  ")[0] for line in lines[lines.index(head) + 1 :] if line.startswith("  ")]
    assert labels[:5] == ["16", "64", "own, contiguous", "contiguous SDPA", "gather + SDPA"]
    assert lines[-1] == "These figures say nothing of a GPU; for one, run this on it."
    assert max(len(line) for line in lines) <= 80


def test_a_wrong_kernel_shows_no_number_and_exits_1(
    wrong_backend: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ["--block-size", "16", "--backend", wrong_backend]
    assert main(["bench", *SMALL, *flags, "-o", str(tmp_path / "run")]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("CPU RUN  not a GPU figure: one-percent-off kernel")
    assert lines[1] == "WRONG RESULT  2 cells have no number: the check before timing failed"
    row = next(line for line in lines if line.startswith("  16 "))
    assert row.split() == ["16", "random", "-", "-", "-", "-", "WRONG"]
    assert any("No number for one-percent-off at block size 16: wrong result: relative" in x for x in lines)
    kernel = read_tables(tmp_path / "run", ["kernel"])["kernel"].to_pylist()
    assert kernel[0]["status"] == "failed"
    assert kernel[0]["max_error"] == pytest.approx(0.01)
    assert kernel[0]["median_ms"] is None
    assert kernel[0]["kv_gb_per_s"] is None


def test_csv_has_a_line_a_row_and_plot_draws_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
    picture = tmp_path / "blocks.png"
    flags = ["--block-size", "16", "--format", "csv", "--plot", str(picture)]
    assert main(["bench", *SMALL, *flags]) == 0
    captured = capsys.readouterr()
    lines = captured.out.splitlines()
    assert set(lines[0].split(",")) == ROW_KEYS
    assert len(lines) == 5
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert f"wrote {picture}" in captured.err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--suite", "serve"], "error: --suite is 'serve'; this version has the suite kernel.\n"),
        (["--suite", "all"], "error: --suite is 'all'; this version has the suite kernel.\n"),
        (["--device", "tpu"], "error: --device is 'tpu'; must be one of auto, cuda, cpu.\n"),
        (["--preset", "huge"], "error: --preset is 'huge'; must be one of quick, standard, full.\n"),
        (["--block-size", "0"], "error: --block-size is 0; must be a whole number from 1 to 65,536.\n"),
        (["--max-seconds", "0"], "error: --max-seconds is 0.0; must be more than 0.\n"),
        (["--plot", "x.txt"], "error: --plot x.txt: a picture ends in .png, .svg, .pdf.\n"),
        (["-o", __file__], f"error: -o {__file__} is a file; name a directory.\n"),
    ],
)
def test_bad_flags_are_one_line_and_exit_2(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err == says
    assert captured.out == ""


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a machine without a GPU")
def test_asking_for_a_gpu_that_is_not_there_is_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--device", "cuda"]) == 2
    assert capsys.readouterr().err.startswith("error: --device cuda: torch finds no CUDA device here")


def run_without(package: str, arguments: list[str], tmp_path: Path) -> subprocess.CompletedProcess[str]:
    """Run kvplan where ``package`` is not installed: a finder tells Python that there is no such name."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        f"        if name.partition('.')[0] == {package!r}:\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}', name=name)\n"
        "sys.meta_path.insert(0, Absent())\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    return subprocess.run(
        [sys.executable, "-m", "kvplan", *arguments],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )


def test_without_torch_bench_says_what_to_install_and_help_works(tmp_path: Path) -> None:
    done = run_without("torch", ["bench"], tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: bench needs torch, which is not installed: pip install 'kvplan[bench]'\n"
    assert done.stdout == ""
    shown = run_without("torch", ["bench", "--help"], tmp_path)
    assert shown.returncode == 0
    assert "--block-size" in shown.stdout


def test_without_matplotlib_plot_says_so_before_the_run(tmp_path: Path) -> None:
    done = run_without("matplotlib", ["bench", "--plot", str(tmp_path / "x.png")], tmp_path)
    assert done.returncode == 2
    assert done.stderr == "error: --plot needs matplotlib: pip install 'kvplan[plot]'\n"
