"""kvplan simulate as a user and a program meet it: contract of CLI.md, records through the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from kvplan.cli.app import main
from tests.conftest import shared_path
from tests.sched.oracle import load, native_trace, record_names

SUMMARY_KEYS = [
    "completed",
    "duration_s",
    "request_throughput",
    "output_throughput",
    "total_token_throughput",
    "request_goodput",
    "position_utilization",
    "preemptions",
    "recomputed_tokens",
    "prefix_hit_tokens",
    "prefix_query_tokens",
    "kv_utilization",
    "kv_effective_bytes",
    "kv_shared_bytes",
    "kv_cached_bytes",
    "tail_waste_bytes",
    "reserved_unused_bytes",
    "external_fragmentation_bytes",
    "block_table_bytes",
    "free_bytes",
    "copied_bytes",
    "peak_running",
    "peak_blocks",
    "rejected",
    "timed_out",
    "cancelled",
    "saturated",
    "block_size",
    "assumptions",
    "verdict",
] + [
    f"{s}_{m}_ms"
    for s in ["mean", "median", "std", "p90", "p95", "p99"]
    for m in ["ttft", "tpot", "itl", "e2el"]
]

DEMO = Path(__file__).parents[2] / "traces" / "demo.jsonl"
RECORDS = record_names(*"abcdefgijk") if Path(shared_path()).exists() else []


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["simulate", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_json_has_every_key_of_the_contract(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, str(DEMO), "--block-size", "16", "--block-size", "64", "--format", "json")
    runs = json.loads(out)
    assert code == 0
    assert [r["block_size"] for r in runs] == [16, 64]
    for key in SUMMARY_KEYS:
        assert key in runs[0], key
    assert runs[0]["completed"] == 400
    assert runs[0]["prefix_hit_tokens"] > runs[1]["prefix_hit_tokens"] > 0, "smaller blocks share more"


@pytest.mark.parametrize("name", RECORDS)
def test_records_through_the_command_line(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The flags of a record, `--clock steps --record-decisions`: the decisions table is the record."""
    record = load(name)
    s = record.meta["settings"]
    trace = native_trace(
        shared_path("oracle", "traces", record.meta["trace"]), tmp_path / "t.jsonl", s["hash_id_block"]
    )
    words = [
        str(trace), "--clock", "steps", "--record-decisions", "-o", str(tmp_path / "out"),
        "--num-gpu-blocks-override", str(s["num_gpu_blocks"]), "--block-size", str(s["block_size"]),
        "--max-num-seqs", str(s["max_num_seqs"]),
        "--max-num-batched-tokens", str(s["max_num_batched_tokens"]),
        "--max-model-len", str(s["max_model_len"]), "--scheduling-policy", s["policy"],
        "--long-prefill-token-threshold", str(s["long_prefill_token_threshold"]),
        "--async-scheduling" if s["async_scheduling"] else "--no-async-scheduling",
        f"--{'' if s['scheduler_reserve_full_isl'] else 'no-'}scheduler-reserve-full-isl",
        f"--{'' if s['enable_chunked_prefill'] else 'no-'}enable-chunked-prefill",
        "--enable-prefix-caching" if s["enable_prefix_caching"] else "--no-enable-prefix-caching",
        "--kv-groups", s["arch"],
        "--prefix-cache-retention-interval", str(s["prefix_cache_retention_interval"]).lower(),
    ]  # fmt: skip

    code, _, err = run(capsys, *words)

    assert code == 0, err
    ours = pq.read_table(tmp_path / "out" / "decisions.parquet").to_pydict()
    renamed = {"pc_queries": "cache_query_tokens", "pc_hits": "cache_hit_tokens",
               "pc_preempt_queries": "preempt_cache_query_tokens",
               "pc_preempt_hits": "preempt_cache_hit_tokens"}  # fmt: skip
    for column, theirs in record.steps.items():
        assert ours[renamed.get(column, column)] == [list(v) if isinstance(v, list) else v for v in theirs], (
            column
        )


def test_parquet_tables_and_their_metadata(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "run"
    code, _, err = run(capsys, str(DEMO), "--model", "qwen3-14b", "-o", str(out))
    assert code == 0
    assert "wrote" in err
    requests = pq.read_table(out / "requests.parquet")
    assert requests.num_rows == 400
    assert set(requests.column("status").to_pylist()) == {"finished"}
    meta = json.loads(requests.schema.metadata[b"kvplan"])
    assert meta["provenance"]["kind"] == "constructed"
    assert len(meta["provenance"]["sha256"]) == 64
    assert meta["settings"]["model"] == "Qwen/Qwen3-14B"
    assert pq.read_table(out / "summary.parquet").num_rows == 1
    assert not list(tmp_path.glob(".run*")), "nothing half-written is left"


@pytest.mark.parametrize(
    ("slo", "expected"),
    [("ttft=10s,p99", 0), ("ttft=1ms,p50", 1), ("e2el=1ms", 1)],
)
def test_exit_code_says_whether_the_target_is_met(
    slo: str, expected: int, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, _ = run(capsys, str(DEMO), "--slo", slo)
    assert code == expected
    assert out.splitlines()[0].startswith("MISSES TARGET" if expected else "MEETS TARGET")


def test_a_model_that_does_not_start_is_exit_1(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, str(DEMO), "--model", "llama-3.3-70b", "--gpu", "h100")
    assert (code, out.split("  ")[0]) == (1, "DOES NOT START")
    code, _, err = run(
        capsys, str(DEMO), "--model", "llama-3.3-70b", "--gpu", "h100", "--num-gpu-blocks-override", "5000"
    )
    assert code == 0
    assert "would not start" in err


BAD = [
    (["nowhere.jsonl"], "does not exist"),
    (["--block-size", "0"], "--block-size is 0"),
    (["--request-rate", "-1"], "--request-rate is -1"),
    (["--request-rate", "nan"], "--request-rate is nan"),
    (["--max-concurrency", "0"], "--max-concurrency is 0"),
    (["--slo", "ttft=fast"], "--slo"),
    (["--allocation", "magic"], "--allocation magic"),
    (["--allocation", "reserve-max:0"], "reserve-max:0"),
    (["--random-len-range", "1,0.5"], "--random-len-range"),
    (["--random-range-ratio", "2"], "--random-range-ratio is 2"),
    (["--random-range-ratio", "0.1", "--random-len-range", "0.8,1"], "use one"),
    (["--record-decisions"], "-o DIR"),
    ([str(DEMO), "--num-prompts", "5"], "use one"),
    (["--trace-format", "azure"], "needs a TRACE"),
    (["--model", "google/gemma-4-31b-it"], "KV groups"),
    (["--kv-groups", "swa:0:1"], "--kv-groups is swa:0:1"),
    (["--kv-groups", "swa:64:2", "--allocation", "reserve-max"], "one KV group"),
    (["--num-speculative-tokens", "2"], "not simulated yet"),
    (["-dp", "2"], "not simulated yet"),
    (["--plot", "x.exe"], "--plot"),
    (["--clock", "sundial"], "sundial"),
]


@pytest.mark.parametrize(("words", "expected"), BAD, ids=[" ".join(words)[:40] for words, _ in BAD])
def test_bad_input_is_one_line_and_exit_2(
    words: list[str], expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, "")
    first, *rest = err.splitlines()
    assert first.startswith("error: ")
    assert expected in err
    assert all(line.startswith("  ") for line in rest)


def test_it_imports_neither_pandas_nor_torch() -> None:
    code = (
        "import sys; from kvplan.cli.app import main; "
        "main(['simulate', '--num-prompts', '5', '--quiet', '--format', 'json']); "
        "bad = {'pandas', 'torch', 'matplotlib'} & set(sys.modules); sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_first_lines_fit_80_columns_and_numbers_are_whole(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (
        [str(DEMO)],
        [str(DEMO), "--block-size", "8", "--block-size", "128", "--slo", "ttft=1s,p95"],
    ):
        _, out, _ = run(capsys, *words)
        long = [line for line in out.splitlines() if len(line) > 80]
        assert long == []
        assert "\x1b" not in out, "no colour into a pipe"


@pytest.mark.parametrize("sizes", [[], ["--block-size", "16", "--block-size", "32"]], ids=["one", "two"])
def test_ctrl_c_keeps_what_there_is(sizes: list[str], tmp_path: Path) -> None:
    """SIGINT during a run, also of several sizes in threads: exit 130, whole tables, requests so far in them.

    The signal is sent from the first report of progress, so that it always comes while a run goes on.
    """
    code = (
        "import os, signal, sys; from kvplan.cli import render, app; "
        "render.Progress.update = lambda *a: os.kill(os.getpid(), signal.SIGINT) "
        "if not hasattr(render, 'hit') and not setattr(render, 'hit', 1) else None; "
        "sys.exit(app.main(sys.argv[1:]))"
    )
    words = [
        "simulate", "--num-prompts", "20000", "--random-input-len", "400", "--random-output-len", "300",
        "--request-rate", "30", "-o", str(tmp_path / "run"), *sizes,
    ]  # fmt: skip

    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)

    assert done.returncode == 130, done.stderr
    assert done.stdout.startswith("INTERRUPTED")
    assert "Traceback" not in done.stderr
    rows: list[dict[str, Any]] = pq.read_table(tmp_path / "run" / "summary.parquet").to_pylist()
    assert rows[0]["interrupted"] is True
    assert 0 < rows[0]["completed"] < 20000
    folder = tmp_path / "run" / ("block-16" if sizes else "")
    status = pq.read_table(folder / "requests.parquet").column("status").to_pylist()
    assert status.count("finished") == rows[0]["completed"]
    assert status.count("unfinished") == 20000 - rows[0]["completed"]
    assert not list(tmp_path.glob(".run*")), "nothing half-written is left"


def jsonl(path: Path, *rows: dict[str, Any]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def test_a_target_without_a_value_is_said_and_not_nan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A one-token answer has no TPOT."""
    one = jsonl(tmp_path / "one.jsonl", {"timestamp": 0, "input_length": 100, "output_length": 1})
    code, out, _ = run(capsys, one, "--slo", "tpot=1ms")
    assert (code, out.splitlines()[0]) == (0, "MEETS TARGET  TPOT p99 has no value (target 1 ms)")
    _, out, _ = run(capsys, one, "--slo", "tpot=1ms", "--format", "json")
    assert json.loads(out)[0]["verdict"]["targets"][0]["value_ms"] is None


def test_when_none_is_served_the_first_line_and_the_cause_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--random-input-len", "200000", "--num-prompts", "20")
    assert (code, out.splitlines()[0]) == (0, "NONE SERVED  of 20 requests")
    assert "20 rejected (prompt not below max_model_len 131,072)" in " ".join(out.split())
    assert "nan" not in out


def test_a_table_of_sizes_shows_the_figures_of_its_targets(capsys: pytest.CaptureFixture[str]) -> None:
    """The column is the statistic that was asked for, not always p95."""
    _, out, _ = run(
        capsys, str(DEMO), "--block-size", "16", "--block-size", "64", "--slo", "e2el=10s,p50", "--slo",
        "ttft=10s,mean",
    )  # fmt: skip
    head = next(line for line in out.splitlines() if line.lstrip().startswith("block "))
    assert "E2E p50 ms" in head
    assert "TTFT mean ms" in head
    assert "p95" not in head


def test_the_step_clock_counts_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, str(DEMO), "--clock", "steps")
    assert "output tok/step" in out
    assert "req/s," not in out


def test_a_band_of_large_times_fits_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, str(DEMO), "--max-num-seqs", "1")
    assert "TTFT band" in out
    assert [line for line in out.splitlines() if len(line) > 80] == []


def test_quiet_keeps_notes_off_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, str(DEMO), "--num-gpu-blocks-override", "700", "--quiet")
    assert (code, err) == (0, "")


def test_each_size_has_a_picture_of_its_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    run(capsys, str(DEMO), "--block-size", "16", "--block-size", "64", "--plot", str(tmp_path / "p.png"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p-block-16.png", "p-block-64.png"]


def test_provenance_names_the_range_and_an_infinite_rate(capsys: pytest.CaptureFixture[str]) -> None:
    """A run can be made again from its own description."""
    words = ["--num-prompts", "5", "--random-input-len", "64", "--random-range-ratio", "0.5"]
    _, out, _ = run(capsys, *words, "--request-rate", "inf")
    text = " ".join(out.split())
    assert "--random-range-ratio 0.5; all at once" in text
    assert "inf/s" not in text


def test_progress_of_a_million_requests_keeps_the_time_left_at_80_columns() -> None:
    from dataclasses import replace

    from kvplan.cli.render import Progress, Terminal

    progress = Progress("simulate", 1_000_000, "req")
    progress.term = replace(Terminal(), width=80)
    line = progress.line(12_951, "KV 100 %", 60.0)
    assert line.endswith("76:12 left")
    assert len(line) <= 79
    assert progress.line(500_000, "KV 4 %", 1.0).endswith("0:01 left")


def test_reservations_are_not_drawn_as_tail_waste(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    words = ["--num-prompts", "20", "--allocation", "reserve-pow2", "--plot", str(tmp_path / "p.svg")]
    assert run(capsys, *words)[0] == 0
    drawn = (tmp_path / "p.svg").read_text()
    assert "reserved" in drawn
    assert "tail waste" not in drawn


def test_the_same_block_size_twice_is_one_run(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run(capsys, str(DEMO), "--block-size", "16", "--block-size", "16", "--format", "json")
    assert len(json.loads(out)) == 1
