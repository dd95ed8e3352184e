"""Claim: `kvplan models` and `kvplan gpus` give every value its source, and mark what nobody checked."""

from __future__ import annotations

import csv
import io
import json

import pytest

from kvplan.cli.app import main
from kvplan.spec.catalogue import gpus, model_entries


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    code = main(list(argv))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.mark.parametrize(
    "argv", [("models",), ("models", "llama"), ("gpus",), ("gpus", "a100"), ("gpus", "h100 sxm")]
)
def test_tables_fit_80_columns(capsys: pytest.CaptureFixture[str], argv: tuple[str, ...]) -> None:
    code, out, err = run(capsys, *argv)
    assert (code, err) == (0, "")
    assert max(map(len, out.splitlines())) <= 80
    assert "\x1b" not in out


def test_every_entry_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "models", "--format", "json")
    rows = json.loads(out)
    assert [row["id"] for row in rows] == [entry.id for entry in model_entries()]
    _, out, _ = run(capsys, "gpus", "--format", "json")
    assert [row["name"] for row in json.loads(out)] == [gpu.name for gpu in gpus()]


def test_each_value_has_a_confidence_and_each_row_a_source(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("models", "gpus"):
        _, out, _ = run(capsys, command, "--format", "json")
        for row in json.loads(out):
            assert row["source"]
            assert set(row["unverified"]) <= {*row["confidence"], "kv_bytes_per_token"}
            for key in (
                "parameters",
                "kv_bytes_per_token",
                "total_bytes",
                "memory_bandwidth_gb_s",
                "peak_tflops",
            ):
                if row.get(key) is not None:
                    assert row["confidence"][key], (row, key)


def test_unverified_values_are_marked(capsys: pytest.CaptureFixture[str]) -> None:
    """Llama 3 is in the catalogue from general knowledge; the A40's total is nvidia-smi's."""
    _, out, _ = run(capsys, "models", "llama-3")
    line = next(line for line in out.splitlines() if "Meta-Llama-3-8B" in line)
    assert line.split()[-1] == "8,192?"
    assert "8.03 B?" in line
    assert "128 KiB  131,072" in next(line for line in out.splitlines() if "Llama-3.1-8B" in line)
    _, out, _ = run(capsys, "gpus", "a40")
    assert "not verified" in out
    assert "44.99 GiB" in out


def test_one_match_shows_every_value(capsys: pytest.CaptureFixture[str]) -> None:
    """Gemma 3 27B: 62 layers x 2 x 16 heads x 128 x 2 B = 496 KiB, 27,432,406,640 parameters (facts)."""
    _, out, _ = run(capsys, "models", "gemma-3-27b")
    for text in ("496 KiB", "27,432,406,640", "52 sliding, 10 full", "parameter count exact", "Source: "):
        assert text in out


def test_a_name_that_resolves_shows_the_entry_it_resolves_to(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "models", "llama-3.3-70b-fp8")
    assert out.startswith("meta-llama/Llama-3.3-70B-Instruct")


def test_what_cannot_be_laid_out_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "models", "deepseek-v4-flash")
    assert "KV layout not known" in out.splitlines()[0]
    assert "compressed attention" in out


def test_csv_and_markdown_have_a_row_a_model(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, "models", "qwen3", "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert {"Qwen/Qwen3-32B", "Qwen/Qwen3-0.6B"} <= {row["id"] for row in rows}
    assert next(row for row in rows if row["id"] == "Qwen/Qwen3-32B")["kv_bytes_per_token"] == "262144"
    _, out, _ = run(capsys, "gpus", "h100", "--format", "markdown")
    assert len(out.splitlines()) == 2 + 3


@pytest.mark.parametrize(
    ("argv", "names"),
    [
        (("models", "llamma-3.3-70b"), "Nearest: llama-3.3-70b"),
        (("models", "xyzzy"), "is neither in the catalogue nor a path"),
        (("gpus", "h1000"), "Nearest: H100"),
        (("models", "--format", "xml"), "xml"),
        (("gpus", "a", "b"), "b"),
    ],
)
def test_bad_input_exits_with_2(
    capsys: pytest.CaptureFixture[str], argv: tuple[str, ...], names: str
) -> None:
    code, out, err = run(capsys, *argv)
    assert code == 2
    assert out == ""
    assert names in err
    assert err.startswith("error: ")
