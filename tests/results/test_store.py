"""Results on disk: whole or not at all, with where they come from; and without pandas."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from kvplan.errors import InputError
from kvplan.results import schema, store


def requests_columns(n: int) -> dict[str, object]:
    """A requests table of n rows in which the last request was rejected."""
    columns: dict[str, object] = {}
    for name, kind in schema.REQUESTS.items():
        if kind == "str":
            columns[name] = [f"{name}{i}" for i in range(n)]
        elif kind == "float":
            columns[name] = np.where(np.arange(n) < n - 1, np.arange(n) + 0.5, np.nan)
        else:
            columns[name] = np.arange(n)
    columns["reason"] = [None] * (n - 1) + ["needs 12 blocks, the pool has 10"]
    return columns


def test_tables_read_back_as_written_with_null_for_never() -> None:
    table = schema.make_table("requests", requests_columns(3))
    table.validate(full=True)
    assert table.column_names == list(schema.REQUESTS)
    assert table["finish_s"].to_pylist() == [0.5, 1.5, None]
    assert table["reason"].to_pylist() == [None, None, "needs 12 blocks, the pool has 10"]
    assert table["id"].to_pylist() == ["id0", "id1", "id2"]
    assert table["request"].type == pa.int64()


def test_list_columns_take_lists_or_offsets() -> None:
    columns: dict[str, object] = {
        name: [[1, 2], [], [3]] if kind == "ints" else [1, 2, 3] for name, kind in schema.DECISIONS.items()
    }
    columns["running"] = (np.array([0, 2, 2, 3]), np.array([1, 2, 3]))
    table = schema.make_table("decisions", columns)
    table.validate(full=True)
    assert table["sched_req"].to_pylist() == table["running"].to_pylist() == [[1, 2], [], [3]]


def test_wrong_columns_are_refused_by_name() -> None:
    columns = requests_columns(2)
    del columns["ttft_s"]
    with pytest.raises(ValueError, match="ttft_s"):
        schema.make_table("requests", columns)
    with pytest.raises(ValueError, match="length"):
        schema.make_table("requests", {**requests_columns(2), "id": ["only one"]})


def test_summary_rows_take_nulls_nested_values_and_extra_keys() -> None:
    table = schema.summary_table(
        [
            {"block_size": 16, "saturated": True, "mean_ttft_ms": float("nan"), "verdict": {"met": True}},
            {"block_size": 32, "saturated": False, "mean_ttft_ms": 1.5, "verdict": {"met": False}},
        ]
    )
    table.validate(full=True)
    assert table["saturated"].to_pylist() == [True, False]
    assert table["mean_ttft_ms"].to_pylist() == [None, 1.5]
    assert table["completed"].to_pylist() == [None, None]
    assert table["verdict"].to_pylist() == ['{"met": true}', '{"met": false}']


def test_rows_table_types_by_value() -> None:
    table = schema.rows_table(
        [{"a": 1, "b": 2, "c": "x", "d": True}, {"a": 2.5, "b": None, "c": "y", "d": False}]
    )
    assert table.to_pylist() == [
        {"a": 1.0, "b": 2, "c": "x", "d": True},
        {"a": 2.5, "b": None, "c": "y", "d": False},
    ]


METADATA = store.run_metadata(
    ["kvplan", "simulate", "x"], {"block_size": 16}, {"kind": "constructed", "seed": 0}
)


def small(value: int) -> pa.Table:
    return schema.rows_table([{"value": value}])


def test_a_run_carries_command_settings_versions_provenance_and_device(tmp_path: Path) -> None:
    (path,) = store.write_tables(tmp_path / "new" / "run", {"summary": small(1)}, METADATA)
    kept = store.read_metadata(path)
    assert kept["command"] == "kvplan simulate x"
    assert kept["settings"] == {"block_size": 16}
    assert kept["provenance"] == {"kind": "constructed", "seed": 0}
    assert set(kept["versions"]) >= {"kvplan", "python", "numpy", "pyarrow"}
    assert kept["device"] == "none (modelled)"
    assert kept["run_id"]


def test_a_second_run_replaces_ours_and_leaves_what_is_not_ours(tmp_path: Path) -> None:
    run = tmp_path / "run"
    store.write_tables(run, {"summary": small(1), "decisions": small(1)}, METADATA)
    (run / "notes.txt").write_text("mine")
    pq.write_table(small(9), run / "foreign.parquet")
    (run / "broken.parquet").write_bytes(b"not parquet")

    store.write_tables(run, {"summary": small(2)}, METADATA)
    assert sorted(p.name for p in run.iterdir()) == [
        "broken.parquet",
        "foreign.parquet",
        "notes.txt",
        "summary.parquet",
    ], "decisions of the earlier run are gone, all else stays"
    assert store.read_tables(run, ["summary"])["summary"]["value"].to_pylist() == [2]
    assert [p.name for p in tmp_path.iterdir()] == ["run"], "no temporary is left"


def test_a_failed_write_leaves_the_earlier_run_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The disk fills while the second of three tables is written."""
    run = tmp_path / "run"
    tables = {name: small(1) for name in ("summary", "requests", "timeline")}
    store.write_tables(run, tables, METADATA)
    write, calls = pq.write_table, []

    def full(*args: object, **kwargs: object) -> None:
        calls.append(args)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        write(*args, **kwargs)

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(InputError, match="No space left on device"):
        store.write_tables(run, {name: small(2) for name in tables}, METADATA)
    read = store.read_tables(run, list(tables))
    assert [t["value"].to_pylist() for t in read.values()] == [[1], [1], [1]]
    assert [p.name for p in tmp_path.iterdir()] == ["run"]


KILLED = """
import sys
from kvplan.results import schema, store
names = "summary", "requests", "timeline"
while True:
    for value in range(1000):
        tables = {n: schema.rows_table([{"value": value}] * 1000) for n in names}
        store.write_tables(sys.argv[1], tables, {})
        print(value, flush=True)
"""


@pytest.mark.parametrize("delay_s", [0.0, 0.003, 0.011])
def test_kill_9_leaves_whole_files_and_the_next_run_clears_up(tmp_path: Path, delay_s: float) -> None:
    run = tmp_path / "run"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(run)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay_s)
        process.kill()
    for name in ("summary", "requests", "timeline"):
        values = pq.read_table(run / f"{name}.parquet")["value"].to_pylist()
        assert len(values) == 1000
        assert len(set(values)) == 1
    store.write_tables(run, {name: small(7) for name in ("summary", "requests", "timeline")}, METADATA)
    assert [p.name for p in tmp_path.iterdir()] == ["run"]
    assert store.read_tables(run, ["summary", "timeline"])["timeline"]["value"].to_pylist() == [7]


def test_tables_of_different_runs_are_not_read_as_one(tmp_path: Path) -> None:
    store.write_tables(tmp_path / "a", {"summary": small(1), "requests": small(1)}, METADATA)
    store.write_tables(tmp_path / "b", {"summary": small(2)}, METADATA)
    os.replace(tmp_path / "b" / "summary.parquet", tmp_path / "a" / "summary.parquet")
    with pytest.raises(InputError, match="different runs"):
        store.read_tables(tmp_path / "a", ["summary", "requests"])
    with pytest.raises(InputError, match=r"no timeline\.parquet"):
        store.read_tables(tmp_path / "a", ["timeline"])


def test_places_that_cannot_be_written_are_input_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        store.write_tables(tmp_path / "file", {"summary": small(1)}, METADATA)
    with pytest.raises(InputError, match="cannot be written"):
        store.write_tables(tmp_path / "file" / "run", {"summary": small(1)}, METADATA)
    with pytest.raises(InputError, match="is a directory"):
        store.write_file(tmp_path, small(1), METADATA)
    assert store.write_file(tmp_path / "x.parquet", small(1), METADATA).is_file()


WRITES_AND_READS = """
import sys
import numpy as np
from kvplan.results import schema, store
ones = {"str": ["a"], "ints": [[1]]}
columns = {name: ones.get(kind, np.ones(1)) for name, kind in schema.DECISIONS.items()}
tables = {
    "decisions": schema.make_table("decisions", columns),
    "summary": schema.summary_table([{"block_size": 16, "verdict": None, "model": "x"}]),
}
store.write_tables(sys.argv[1], tables, {})
store.read_tables(sys.argv[1], ["decisions"])
print("pandas" in sys.modules)
"""


def test_writing_results_imports_no_pandas(tmp_path: Path) -> None:
    """Pandas costs 0.6 s and tens of MB; simulate must not pay it (ARCHITECTURE.md)."""
    command = [sys.executable, "-c", WRITES_AND_READS, str(tmp_path / "run")]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == "False\n"
