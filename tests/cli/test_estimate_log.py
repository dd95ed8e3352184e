"""`kvplan estimate --from-log`: a start-up log beside the prediction.

The logs here are constructed: lines worded as in public vLLM threads (vllm#10511, #12126, #17122, #28228),
figures of evidence row llmd-qwen-qwen2-5-7b-i-h100-80gb-tp1pp1dp1-8192-dtbf16.
"""

from __future__ import annotations

import json

import pytest

from kvplan.cli.app import main
from kvplan.memory.startup_log import read_startup_log

CONFIG = (
    "(EngineCore_DP0 pid=9) INFO 02-01 23:01:31 [core.py:54] Initializing a V1 LLM engine (v0.19.0) with "
    "config: model='Qwen/Qwen2.5-7B-Instruct', speculative_config=None, dtype=torch.bfloat16, "
    "max_seq_len=8192, tensor_parallel_size=1, pipeline_parallel_size=1, quantization=None, "
    "enforce_eager=False, kv_cache_dtype=auto, enable_prefix_caching=False\n"
)
ARGUMENTS = (
    "(APIServer pid=1) INFO [utils.py:250] non-default args: {'model': 'Qwen/Qwen2.5-7B-Instruct', "
    "'max_model_len': 8192, 'gpu_memory_utilization': 0.95, 'max_num_seqs': 1024}\n"
    "INFO [scheduler.py:226] Chunked prefill is enabled with max_num_batched_tokens=8192.\n"
)
FIGURES = (
    "INFO [gpu_model_runner.py:1316] Model loading took 14.25 GiB and 3.652170 seconds\n"
    "INFO [worker.py:294] the current vLLM instance can use total_gpu_memory (79.19GiB) x "
    "gpu_memory_utilization (0.95) = 75.23GiB\n"
    "INFO [worker.py:294] model weights take 14.25GiB; non_torch_memory takes 0.24GiB; PyTorch activation "
    "peak memory takes 2.21GiB; the rest of the memory reserved for KV Cache is 58.53GiB.\n"
    "INFO [gpu_worker.py:358] Available KV cache memory: 58.53 GiB\n"
    "INFO [kv_cache_utils.py:1305] GPU KV cache size: 1,095,920 tokens\n"
    "INFO [kv_cache_utils.py:1310] Maximum concurrency for 8,192 tokens per request: 133.78x\n"
    "INFO [gpu_model_runner.py:4199] Graph capturing finished in 7 secs, took 0.87 GiB\n"
)


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "server.log"
    path.write_text(ARGUMENTS + CONFIG + FIGURES)
    return path


def test_printed_and_predicted_agree_term_by_term(log, capsys):
    """Expected: the row's printed figures; predictions within 0.02 GiB, tokens within the rounding."""
    assert main(["estimate", "--from-log", str(log), "--gpu", "h100", "--format", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    terms = {row["term"]: row for row in found["terms"]}
    for term, printed in (
        ("weights", 14.25),
        ("activation peak", 2.21),
        ("non-torch", 0.24),
        ("KV pool", 58.53),
    ):
        assert terms[term]["printed"] == printed
        assert terms[term]["predicted"] == pytest.approx(printed, abs=0.02), term
    assert terms["tokens of that pool"]["predicted"] == pytest.approx(1_095_920, abs=100)
    assert terms["requests of 8,192"]["predicted"] == pytest.approx(133.78, abs=0.01)
    assert found["flags"]["engine_version"] == "0.19.0"
    assert found["flags"]["max_num_batched_tokens"] == 8192


def test_first_line_is_the_error(log, capsys):
    assert main(["estimate", "--from-log", str(log), "--gpu", "h100"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("LOG  KV pool 58.53 GiB printed, 58.53 predicted: 0.00 % of the budget off\n")
    assert "From the log: engine_version 0.19.0" in out


def test_flags_by_hand_replace_those_of_the_log(log, capsys):
    """A wrong utilisation by hand is off by 0.05 x 79.19 = 3.96 GiB."""
    words = ["--gpu", "h100", "--gpu-memory-utilization", "0.9", "--format", "json"]
    assert main(["estimate", "--from-log", str(log), *words]) == 0
    terms = {row["term"]: row for row in json.loads(capsys.readouterr().out)["terms"]}
    assert terms["KV pool"]["predicted"] - 58.53 == pytest.approx(-3.96, abs=0.02)


def test_old_wording(tmp_path):
    """V0-time lines (vllm#10511): one figure a line, no commas."""
    path = tmp_path / "old.log"
    path.write_text(
        "INFO 12-13 19:54:18 worker.py:243] total_gpu_memory     79.22GiB\n"
        "INFO 12-13 19:54:18 worker.py:243] gpu_memory_utilization       0.90\n"
        "INFO 12-13 19:54:18 worker.py:243] model weights take   14.96GiB\n"
        "INFO 12-13 19:54:18 worker.py:243] non_torch_memory     1.79GiB\n"
        "INFO 12-13 19:54:18 worker.py:243] PyTorch activation peak memory       1.26GiB\n"
        "INFO 12-13 19:54:18 worker.py:243] available_kv_cache_memory    53.29GiB\n"
        "INFO 01-30 03:19:14 kv_cache_utils.py:395] # GPU blocks: 1381\n"
    )
    figures = read_startup_log(path).figures
    assert figures == {
        "total_gib": 79.22,
        "gpu_memory_utilization": 0.90,
        "weights_gib": 14.96,
        "non_torch_gib": 1.79,
        "activation_gib": 1.26,
        "available_kv_gib": 53.29,
        "num_gpu_blocks": 1381,
    }


@pytest.mark.parametrize(
    ("content", "words", "message"),
    [
        (None, (), "No such file"),
        ("nothing here\n", (), "prints no memory figure"),
        (FIGURES, (), "names no model; give MODEL"),
        (CONFIG.replace("v0.19.0", "v0.7.4") + FIGURES, (), "engine V0"),
        (CONFIG.replace("max_seq_len=8192", "max_seq_len=0") + FIGURES, (), "--max-model-len is 0"),
        (CONFIG + FIGURES, ("--explain",), "--from-log goes with"),
    ],
)
def test_bad_logs_are_one_line_and_exit_2(tmp_path, capsys, content, words, message):
    path = tmp_path / "server.log"
    if content is not None:
        path.write_text(content)
    assert main(["estimate", "--from-log", str(path), *words]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err.splitlines()[0]
