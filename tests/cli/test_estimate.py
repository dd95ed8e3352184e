"""`kvplan estimate` as a user meets it: verdict first, parts that add up, exit codes, machine formats."""

from __future__ import annotations

import csv
import io
import json
import re
import subprocess
import sys

import pyarrow.parquet as pq
import pytest

from kvplan.cli.app import main
from tests.conftest import shared_path

GIB = 1 << 30
KEYS = {
    "model": str, "resolved_from": str, "gpu": str, "engine": dict, "kv": dict, "memory": dict,
    "capacity": dict, "workload": dict, "verdict": dict, "assumptions": list, "sources": dict,
}  # fmt: skip


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(["estimate", *words])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def as_json(capsys: pytest.CaptureFixture[str], *words: str) -> dict:
    _, out, _ = run(capsys, *words, "--format", "json")
    return json.loads(out)


def test_bare_command_answers_for_an_8b_model_on_one_h100(capsys):
    """CLI.md: the default is Llama-3.1-8B-Instruct on one H100 SXM with the newest vLLM known."""
    code, out, err = run(capsys)
    assert code == 0
    assert re.match(r"FITS  \d+\.\d\d requests of 131,072 tokens at once\n", out)
    assert "Llama-3.1-8B" in out
    assert "1 x H100 SXM, vLLM 0.32.0, per GPU:" in out
    assert "Assumed: " in out
    assert err == ""


def test_shown_parts_add_up_to_what_the_driver_reports(capsys):
    """UX principle 4: the six parts in GiB sum to the total, the percentages to 100."""
    _, out, _ = run(capsys, "llama-3.3-70b-fp8", "--gpu", "h100", "-tp", "2", "--max-model-len", "32768")
    rows = re.findall(r"^  [█▓░·] +[a-zA-Z -]+? +(-?\d+\.\d\d) +(\d+) ", out, re.MULTILINE)
    total = re.search(r"^ +total +(\d+\.\d\d) +100 ", out, re.MULTILINE)
    assert len(rows) == 6
    assert total is not None
    assert sum(float(gib) for gib, _ in rows) == pytest.approx(float(total[1]), abs=1e-6)
    assert sum(int(percent) for _, percent in rows) == 100


def test_does_not_fit_names_the_shortage_and_what_would_do(capsys):
    """UX: 70.6e9 parameters x 2 B are 131.4 GiB; need - budget = short by; gains - short by = spare."""
    code, out, _ = run(capsys, "llama-3.3-70b", "--gpu", "h100")
    assert code == 1
    first = re.match(
        r"DOES NOT FIT  short by (\d+\.\d\d) GiB: weights alone are 131.4\d, the budget is 72.86", out
    )
    assert first is not None, out
    need = dict(
        re.findall(r"^  (weights|engine|one request|budget|short by) +(-?\d+\.\d\d)", out, re.MULTILINE)
    )
    parts = sum(float(need[name]) for name in ("weights", "engine", "one request", "budget"))
    assert parts == pytest.approx(float(need["short by"]), abs=1e-6)
    assert need["short by"] == first[1]
    rows = re.findall(
        r"^  [~ ] (\S.*?) {2,}(\d+) +(\d+\.\d\d) +(-?\d+\.\d\d) +[\d,]+ +(\S+)$", out, re.MULTILINE
    )
    fixes = {label: (int(gpus), float(gain), float(spare), end) for label, gpus, gain, spare, end in rows}
    for label, (_, gain, spare, at_once) in fixes.items():
        assert gain - float(need["short by"]) == pytest.approx(spare, abs=0.011), label
        assert (spare < 0) == (at_once == "no"), label
    assert fixes["TP 4"][2] > 0
    assert fixes["TP 2"][2] < 0
    assert out.rstrip().splitlines()[-1] == "Next: kvplan estimate llama-3.3-70b --gpu h100 -tp 4"


def test_the_suggested_command_fits(capsys):
    """What `Next:` prints runs and exits with 0."""
    _, out, _ = run(capsys, "llama-3.3-70b", "--gpu", "h100")
    words = out.rstrip().splitlines()[-1].removeprefix("Next: kvplan estimate ").split()
    assert run(capsys, *words)[0] == 0


def test_hybrid_shows_slope_and_fixed_cost(capsys):
    """gemma-3-27b at 65,536 (UX.md): 80 KiB a token, 416 MiB of windows, 488 held, 8,168 asked for."""
    code, out, _ = run(capsys, "gemma-3-27b", "--gpu", "h100", "--max-model-len", "65536")
    assert code == 0
    assert "10 full layers, 52 of window 1,024" in out
    for row in (
        r"held \(exact state\) +80 KiB +416 MiB +5\.41",
        r"vLLM holds in decode +80 KiB +488 MiB +5\.48",
        r"vLLM asks for at admission +80 KiB +8,168 MiB +12\.98",
    ):
        assert re.search(row, out), row
    assert "Why vLLM asks for 2.4 times what is held" in out
    assert "7 groups of 10 layers (8 padding)" in out
    assert "1,023 + 2 x 8,192 in-flight tokens" in out
    assert "1,089 blocks, where 65 are held afterwards" in out
    assert "--max-num-batched-tokens 2048" in out


def test_bare_formula(capsys):
    """Seed: L=32, h_kv=8, d=128, b=2 is 131,072 bytes a token, 2 MiB an aggregate block of 16."""
    code, out, _ = run(capsys, "--layers", "32", "--kv-heads", "8", "--head-dim", "128")
    assert code == 0
    assert out.startswith("FORMULA ONLY  131,072 B per token\n")
    found = as_json(capsys, "--layers", "32", "--kv-heads", "8", "--head-dim", "128")
    assert found["kv"]["bytes_per_token"] == 131_072
    assert found["kv"]["bytes_per_block"] == 2 << 20
    assert found["kv"]["groups"][0]["page_bytes"] == 64 << 10
    assert found["verdict"]["fits"] is None
    assert found["memory"]["weights_bytes"] is None


def test_json_has_the_keys_of_the_contract(capsys):
    """CLI.md, `kvplan estimate`; the memory parts make the budget, the capacity follows from the pool."""
    found = as_json(capsys, "llama-3.1-8b", "--input-len", "1000", "--output-len", "200")
    assert list(found) == list(KEYS)
    for key, kind in KEYS.items():
        assert found[key] is None or isinstance(found[key], kind), key
    memory, kv, capacity = found["memory"], found["kv"], found["capacity"]
    assert memory["budget_bytes"] == memory["weights_bytes"] + memory["activation_bytes"] + (
        memory["non_torch_bytes"] + memory["cuda_graph_bytes"] + memory["available_kv_bytes"]
    )
    assert capacity["num_gpu_blocks"] == memory["available_kv_bytes"] // kv["bytes_per_block"]
    assert capacity["max_concurrency"] == pytest.approx(capacity["num_gpu_blocks"] / 8192)
    assert capacity["needed_bytes_one_request"] == 8192 * kv["bytes_per_block"]
    assert found["workload"]["mean_blocks"] == 75
    assert found["engine"]["name"] == "vllm"
    assert found["verdict"] == {"fits": True, "reason": "", "fixes": []}


def test_refused_json_is_filled_all_the_same(capsys):
    """CLI.md: when the verdict is no, kv and capacity are filled."""
    code, out, _ = run(capsys, "llama-3.3-70b", "--format", "json")
    found = json.loads(out)
    assert code == 1
    assert found["verdict"]["fits"] is False
    assert found["kv"]["bytes_per_token"] == 327_680
    assert found["capacity"]["num_gpu_blocks"] == 0
    assert found["memory"]["available_kv_bytes"] < 0
    changes = {fix["change"]: fix["fits"] for fix in found["verdict"]["fixes"]}
    assert changes["TP 4"] is True
    assert changes["TP 2"] is False


def test_csv_and_markdown(capsys):
    _, out, _ = run(capsys, "--format", "csv")
    rows = list(csv.DictReader(io.StringIO(out)))
    assert len(rows) == 1
    assert rows[0]["kv.bytes_per_token"] == "131072"
    _, out, _ = run(capsys, "--format", "markdown")
    assert [line[0] for line in out.splitlines()] == ["|"] * 3


def test_sweep_keeps_rows_that_do_not_fit(capsys):
    """UX: every cell is a row; one that the engine refuses as input is a row with its reason."""
    words = (
        "llama-3.3-70b-fp8", "--max-model-len", "32768", "--sweep", "tensor-parallel-size=1,2,3",
        "--sweep", "kv-cache-dtype=bf16,fp8",
    )  # fmt: skip
    code, out, _ = run(capsys, *words)
    assert code == 0
    assert out.startswith("2 OF 6 FIT  most KV tokens per GPU: TP 2, KV dtype fp8")
    assert out.count("  no") == 4
    results = json.loads(run(capsys, *words, "--format", "json")[1])
    assert [(r["tensor_parallel_size"], r["kv_cache_dtype"]) for r in results] == [
        (tp, dtype) for tp in (1, 2, 3) for dtype in ("bf16", "fp8")
    ]
    assert "cannot split 64 attention heads" in results[4]["verdict"]["reason"]
    bf16, fp8 = results[2], results[3]
    assert fp8["capacity"]["num_gpu_blocks"] == pytest.approx(2 * bf16["capacity"]["num_gpu_blocks"], abs=1)


def test_parquet_has_a_row_a_result(capsys, tmp_path):
    target = tmp_path / "out" / "sweep.parquet"
    code, _, err = run(capsys, "--sweep", "tp=1,2,4,8", "-o", str(target))
    assert code == 0
    table = pq.read_table(target)
    assert table.num_rows == 4
    assert table["tensor_parallel_size"].to_pylist() == [1, 2, 4, 8]
    assert table["kv.bytes_per_token"].to_pylist() == [131072, 65536, 32768, 16384]
    assert "wrote" in err
    assert [p.name for p in target.parent.iterdir()] == ["sweep.parquet"], "no half-written file stays"


def test_concurrency_at_a_trace(capsys):
    """Azure conversation 2023 (../shared/traces): 1,154.7 + 211.1 tokens a request on average."""
    trace = shared_path("traces", "AzureLLMInferenceTrace_conv_2023.csv")
    found = as_json(capsys, "llama-3.1-8b", "--trace", str(trace))
    workload = found["workload"]
    assert workload["requests"] == 19_366
    assert workload["mean_tokens"] == pytest.approx(1365.8, abs=0.1)
    exact = found["capacity"]["num_gpu_blocks"] / workload["mean_blocks"]
    assert workload["concurrency"] == pytest.approx(exact)
    assert workload["concurrency_p5"] < workload["concurrency"] < workload["concurrency_p95"]


def test_explain_follows_by_hand(capsys):
    """Each step's integer follows from the steps it names."""
    _, out, _ = run(capsys, "llama-3.3-70b-fp8", "-tp", "2", "--max-model-len", "32768", "--explain")
    flat = re.sub(r"\s+", " ", out)
    pool = float(re.search(r"KV pool \(2\) - \(3\) - \(4\) - \(5\) - \(6\) ([\d.]+) GiB", flat)[1])
    blocks = int(re.search(r"blocks floor\(\(7\) / \(10\)\) ([\d,]+)", flat)[1].replace(",", ""))
    per_token = int(re.search(r"80 layers x \(8\) x 2 x 128 x 2 B ([\d,]+) B", flat)[1].replace(",", ""))
    assert per_token == 2 * 80 * 4 * 128 * 2
    assert blocks == int(pool * GIB // (16 * per_token))


@pytest.mark.parametrize(
    "words",
    [
        (),
        ("llama-3.3-70b",),
        ("gemma-3-27b", "--max-model-len", "65536"),
        ("qwen3-next-80b-a3b-instruct", "--gpu", "h200", "-tp", "2"),
        ("deepseek-v3", "--gpu", "h200", "-tp", "8"),
        ("qwen3-30b-a3b", "--explain"),
        ("gemma-3-27b", "--explain"),
        ("--sweep", "tp=1,2,4", "--sweep", "kv-cache-dtype=bf16,fp8"),
        ("--kv-cache-memory-bytes", "10G"),
        ("qwen3.8-27b", "--kv-cache-memory-bytes", "9.75G", "--max-model-len", "65536"),
        ("--gpu", "rtx4090", "qwen3-32b"),
        ("--layers", "32", "--kv-heads", "8", "--head-dim", "128"),
        ("llama-3.1-70b", "-pp", "4", "-tp", "2", "--engine-version", "0.19"),
        ("--engine", "sglang"),
        ("--engine", "tensorrt-llm", "llama-3.3-70b"),
    ],
)
@pytest.mark.parametrize("width", [80, 160])
def test_lines_fit_the_terminal_and_carry_no_colour_when_piped(capsys, monkeypatch, words, width):
    """UX principles 5 and 6; commands to copy (`Next:`) are not wrapped."""
    monkeypatch.setenv("COLUMNS", str(width))
    _, out, _ = run(capsys, *words)
    long = [line for line in out.splitlines() if len(line) > width and not line.startswith("Next:")]
    assert not long
    assert "\x1b" not in out


def test_estimate_imports_nothing_heavy():
    """ARCHITECTURE: no torch, numba, pandas, and without --trace or -o neither numpy, pyarrow nor rich."""
    script = (
        "import sys; from kvplan.cli.app import main; main(['estimate']);"
        "print([m for m in ('torch','numba','pandas','numpy','pyarrow','rich') if m in sys.modules],"
        "file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("lama-3.3-70b",), "MODEL 'lama-3.3-70b' is neither in the catalogue nor a path"),
        (("--gpu", "h1000"), "--gpu 'h1000' is not in the catalogue"),
        (("--gpu-memory-gib", "0"), "--gpu-memory-gib is 0; must be a number from 0.1"),
        (("--block-size", "0"), "--block-size is 0; must be a whole number from 1"),
        (("--block-size", "1.5"), "--block-size is 1.5; must be a whole number"),
        (("--max-model-len", "-5"), "--max-model-len is -5; must be a whole number from 1"),
        (("--max-model-len", "1e30"), "--max-model-len is 1e30"),
        (("--max-model-len", "nan"), "--max-model-len is nan"),
        (
            ("--max-model-len", "200000"),
            "--max-model-len 200,000 is above the model's own maximum, 131,072",
        ),
        (
            ("--gpu-memory-utilization", "1.5"),
            "--gpu-memory-utilization is 1.5; must be a number from 0.01 to 1",
        ),
        (("--dtype", "int3"), "--dtype is 'int3'; must be one of"),
        (("--kv-cache-dtype", "fp5"), "--kv-cache-dtype is 'fp5'; must be one of"),
        (("--kv-cache-dtype", "fp8_ds_mla"), "fp8_ds_mla is for MLA models only"),
        (("--quantization", "q9"), "--quantization 'q9' is not known"),
        (("--engine", "tgi"), "--engine is 'tgi'; must be one of"),
        (("--engine-version", "new"), "--engine-version 'new' is not a version"),
        (("--engine-version", "0.8.5"), "engine V0"),
        (("-tp", "3"), "-tp 3 cannot split 32 attention heads and 8 KV heads"),
        (("qwen3-14b", "-tp", "5"), "-tp 5 cannot split 8 KV heads and a vocabulary of 151,936"),
        (("-pp", "99"), "-pp 99"),
        (("-tp", "0"), "--tensor-parallel-size is 0"),
        (("-tp", "4", "--decode-context-parallel-size", "3"), "--decode-context-parallel-size 3 must divide"),
        (("--max-num-seqs", "4096", "--max-num-batched-tokens", "2048"), "is below max_num_seqs 4,096"),
        (("--no-enable-chunked-prefill", "--max-num-batched-tokens", "2048"), "is below max_model_len"),
        (("--kv-cache-layout", "BLNHC", "--engine-version", "0.26"), "BLNHC exists from vLLM 0.29"),
        (("--watermark", "0.01", "--engine-version", "0.19"), "--watermark exists from vLLM 0.26"),
        (("--speculative-model", "llama-3.2-1b"), "--speculative-model needs --num-speculative-tokens"),
        (("--num-speculative-tokens", "2"), "needs --speculative-model M"),
        (("--max-lora-rank", "16"), "--max-lora-rank needs --max-loras"),
        (("--kv-cache-memory-bytes", "1G", "--num-gpu-blocks-override", "5"), "both set the pool"),
        (("llama-3.1-8b", "--layers", "3"), "both give the shape"),
        (("--layers", "32", "--kv-heads", "8"), "--head-dim missing"),
        (("--sweep", "nonsense"), "must look like FLAG=V1,V2"),
        (("--sweep", "block=1"), "'block' is not an engine flag"),
        (("--sweep", "tp=1", "--sweep", "tp=2"), "names the same flag twice"),
        (("--sweep", "tp=1,x"), "--tensor-parallel-size is x"),
        (("--sweep", "tp=1", "--explain"), "--explain and --sweep"),
        (("--input-len", "0"), "--input-len is 0"),
        (("--input-len", "200000"), "is longer than max_model_len"),
        (("--trace", "no-such-file.jsonl"), "no-such-file.jsonl"),
        (("-o", "x.csv"), "must end in .parquet"),
        (("deepseek-ai/DeepSeek-V4-Flash",), "compressed attention"),
        (("--bogus",), "No such option"),
    ],
)
def test_bad_input_is_one_line_and_exit_2(capsys, words, message):
    """CLI.md: errors name the flag, what was found, what would do; hints are indented; nothing on stdout."""
    code, out, err = run(capsys, *words)
    assert code == 2, err
    assert out == ""
    first, *hints = err.rstrip("\n").split("\n")
    assert first.startswith("error: ")
    assert message in first, err
    assert all(hint.startswith("  ") for hint in hints), err
    assert "Traceback" not in err


def test_unknown_gpu_with_its_memory_given(capsys):
    """A card that the catalogue lacks is computed from its memory, and the output says so."""
    found = as_json(capsys, "--gpu", "TestCard 9000", "--gpu-memory-gib", "48", "--max-model-len", "8192")
    assert found["gpu"] == "TestCard 9000"
    assert found["memory"]["total_bytes"] == 48 * GIB
    assert any("not in the catalogue" in note for note in found["assumptions"])


def test_unknown_version_takes_the_nearest_older_one(capsys):
    """CLI.md: a version not in our tables takes the nearest older known one and says so."""
    found = as_json(capsys, "--engine-version", "0.31.4")
    assert any("0.31.4 is not in our tables: rules of 0.29 used" in note for note in found["assumptions"])


def test_pool_given_by_hand_skips_the_budget(capsys):
    """--kv-cache-memory-bytes: 10 GiB are 5,120 blocks of 2 MiB for Llama-3.1-8B."""
    found = as_json(capsys, "--kv-cache-memory-bytes", "10G", "--max-model-len", "8192")
    assert found["capacity"]["num_gpu_blocks"] == 5120
    assert found["memory"]["weights_bytes"] is None
    assert found["verdict"]["fits"] is True


def test_kv_heads_are_copied_when_there_are_more_ranks(capsys):
    """KV_SIZING_RULES 2: Qwen3-235B has 4 KV heads; TP 8 keeps one a rank, as TP 4 does."""
    sizes = [as_json(capsys, "qwen3-235b-a22b", "-tp", tp)["kv"]["bytes_per_token"] for tp in ("2", "4", "8")]
    assert sizes == [94 * 2 * 2 * 128 * 2, 94 * 2 * 128 * 2, 94 * 2 * 128 * 2]


def test_state_blocks_limit_the_running_requests(capsys):
    """KV_SIZING_RULES 7: max_num_seqs above the number of blocks refuses to start a state hybrid."""
    code, out, _ = run(capsys, "qwen3.8-27b", "--kv-cache-memory-bytes", "9.75G", "--max-model-len", "65536")
    assert code == 1
    assert re.match(r"DOES NOT FIT  .*max_num_seqs 1,024 exceeds \d+ state blocks", out)


@pytest.mark.parametrize(
    "words",
    [
        ("qwen3-30b-a3b",),
        ("qwen3-235b-a22b", "-tp", "8"),
        ("deepseek-v3", "-tp", "8", "--gpu", "h200"),
        (
            "qwen3-8b",
            "--speculative-model",
            "qwen3-0.6b",
            "--num-speculative-tokens",
            "3",
            "--max-loras",
            "4",
        ),
        ("llama-3.1-8b", "--engine-version", "0.15"),
    ],
)
def test_no_figure_of_the_table_is_cut_at_80_columns(capsys, monkeypatch, words):
    """UX 5: a number is never cut; the reasons beside the parts are short enough for 80 columns."""
    monkeypatch.setenv("COLUMNS", "80")
    _, out, _ = run(capsys, *words)
    assert "…" not in out
    assert max(map(len, out.splitlines())) <= 80


def test_tuned_twin_is_no_assumption_but_a_dropped_format_is(capsys):
    """The default, -Instruct, has the shape of its base: `resolved_from` says so, the table needs no line."""
    _, out, _ = run(capsys)
    assert "taken as" not in out
    _, out, _ = run(capsys, "--format", "json")
    assert json.loads(out)["resolved_from"] == "meta-llama/Llama-3.1-8B-Instruct"
    _, out, _ = run(capsys, "llama-3.3-70b-awq", "-tp", "2")
    assert "is taken as meta-llama/Llama-3.3-70B-Instruct, --quantization awq" in " ".join(out.split())


def test_refusal_adds_up_by_eye(capsys):
    """Parts of the need sum to `short by`; gains - short by = spare in every row (UX 4)."""
    for words in (("qwen3-32b",), ("deepseek-r1", "-tp", "8"), ("llama-3.3-70b",)):
        _, out, _ = run(capsys, *words)
        lines = [line.replace(",", "").split() for line in out.splitlines()]
        need = {line[0]: line for line in lines if line and line[0] in ("weights", "engine", "budget")}
        one = next(line for line in lines if line[:2] == ["one", "request"])
        short = float(next(line for line in lines if line[:2] == ["short", "by"])[2])
        parts = [float(line[1]) for line in need.values()] + [float(one[2])]
        assert sum(parts) == pytest.approx(short, abs=1e-6), words
        rows = (
            re.match(r".+?\s+\d+\s+([\d,.]+)\s+(-?[\d,.]+)\s+[\d,]+\s+(?:[\d.]+|no)$", x)
            for x in out.splitlines()
        )
        fixes = [match for match in rows if match]
        assert len(fixes) >= 5
        for line in fixes:
            gains, spare = (float(group.replace(",", "")) for group in line.groups())
            assert gains - short == pytest.approx(spare, abs=1e-6), line[0]


def test_margin_within_the_error_is_said(capsys):
    """gemma-3-27b at its own maximum on one H100 fits by less than the band of its pool."""
    _, out, _ = run(capsys, "gemma-3-27b", "--gpu", "h100")
    assert "Close: " in out
    _, out, _ = run(capsys, "llama-3.1-8b", "--gpu", "h100")
    assert "Close: " not in out


def test_refused_cells_of_a_sweep_have_their_reason_below(capsys):
    _, out, _ = run(capsys, "llama-3.1-8b", "--sweep", "tp=1,3")
    assert "TP 3: -tp 3 cannot split 32 attention heads and 8 KV heads." in out


def test_a_pool_in_blocks_is_not_mended_by_more_gpus(capsys):
    """--num-gpu-blocks-override counts blocks: TP or fp8 KV leave its tokens as they are."""
    code, out, _ = run(capsys, "llama-3.1-8b", "--num-gpu-blocks-override", "1000")
    assert code == 1
    assert "--max-model-len 15984" in out
    assert "TP 2" not in out
    assert max(map(len, out.splitlines())) <= 80
