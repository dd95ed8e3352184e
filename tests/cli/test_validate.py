"""kvplan validate: the table, every row, and the machine formats (CLI.md, UX.md)."""

from __future__ import annotations

import csv
import io
import json

import pytest

from kvplan.cli.app import main


def run(capsys, *words: str) -> str:
    assert main(["validate", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


@pytest.mark.parametrize("words", [(), ("--rows",), ("--by", "engine_version"), ("--by", "gpu")])
@pytest.mark.parametrize("columns", ["80", "120"])
def test_fits_the_terminal(capsys, monkeypatch, words, columns):
    monkeypatch.setenv("COLUMNS", columns)
    out = run(capsys, *words)
    assert max(map(len, out.splitlines())) <= int(columns)
    assert out.startswith("67 OF 72  ")


def test_wrong_and_uncovered_rows_are_named(capsys):
    """UX: exactness and error are two columns; what is wrong or not covered is said with its reason."""
    out = " ".join(run(capsys).split())
    assert "KV pool, version and utilisation stated: 38 rows" in out
    assert "idx-deepseek-r1-h20-v0 (engine V0 padded the MLA entry" in out
    assert "compressed attention is refused by name" in out


def test_json_has_the_groups_and_with_rows_each_log(capsys):
    plain = json.loads(run(capsys, "--format", "json"))
    assert "results" not in plain
    assert sum(group["right"] for group in plain["groups"]) == plain["right"] == 67
    full = json.loads(run(capsys, "--format", "json", "--rows"))
    assert len(full["results"]) == full["rows"] + full["not_covered"]
    row = next(r for r in full["results"] if r["id"] == "vllm32105-pp8")
    assert row["source"] == "vllm#32105"
    assert row["right"] is True
    assert row["predicted"]["needed_kv_gib"] == pytest.approx(71.16, abs=0.006)  # as that thread prints it


def test_csv_is_a_row_a_group(capsys):
    rows = list(csv.DictReader(io.StringIO(run(capsys, "--format", "csv", "--by", "gpu"))))
    assert sum(int(row["rows"]) for row in rows) == 72


def test_unknown_group_is_refused(capsys):
    assert main(["validate", "--by", "colour"]) == 2
    assert "--by" in capsys.readouterr().err
