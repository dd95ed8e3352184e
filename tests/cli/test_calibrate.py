"""kvplan calibrate: from a bench result to a file of factors."""

from __future__ import annotations

import json

import numpy as np
import pytest
from typer.testing import CliRunner

from kvplan.cli.calibrate import app
from kvplan.errors import InputError
from kvplan.sim.calibrate import load
from kvplan.sim.rules import rules_for
from kvplan.sim.run import simulate
from kvplan.sim.steptime import Calibration, clock_for
from kvplan.sim.tables import request_times
from kvplan.spec.catalogue import find_gpu, find_model
from kvplan.spec.engine import EngineSettings, resolve
from kvplan.trace.generate import random_trace

FLAGS = ["--model", "meta-llama/Llama-3.1-8B", "--gpu", "h100", "--max-model-len", "8192"]


@pytest.fixture
def bench_file(tmp_path):
    """A `vllm bench serve` result of a machine whose steps take 1.3 times as long as modelled."""
    model, gpu = find_model(FLAGS[1]).spec, find_gpu("h100")
    settings = EngineSettings(max_model_len=8192)
    engine = resolve(settings, model, gpu)
    clock = clock_for(
        model,
        gpu,
        EngineSettings(
            max_num_batched_tokens=engine.max_num_batched_tokens, max_num_seqs=engine.max_num_seqs
        ),
        Calibration(time=1.3),
    )
    trace = random_trace(150, 800, 150, seed=1, range_ratio=0.4, request_rate=10.0)
    times = request_times(simulate(trace, rules_for(engine, 30000, 16), clock))
    decode = times.tpot_s * (trace.output_tokens - 1)
    result = {
        "input_lens": trace.input_tokens.tolist(),
        "output_lens": trace.output_tokens.tolist(),
        "ttfts": times.ttft_s.tolist(),
        "itls": [[float(t)] for t in np.nan_to_num(decode)],
        "start_times": (1000 + trace.arrival_s).tolist(),
        "request_rate": 10.0,
    }
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(result))
    return path


def test_calibrate_finds_the_factor_and_writes_it(bench_file, tmp_path):
    out = tmp_path / "cal.json"
    result = CliRunner().invoke(app, [str(bench_file), *FLAGS, "-o", str(out), "--format", "json"])
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)[0]
    assert row["time"] == pytest.approx(1.3, rel=0.03)
    assert row["held_out"] < 0.05 < row["held_out_before"]
    calibration, about = load(out)
    assert calibration.time == pytest.approx(row["time"])
    assert about["gpu"] == "H100 SXM"


def test_calibrate_says_errors_before_and_after(bench_file):
    result = CliRunner().invoke(app, [str(bench_file), *FLAGS])
    assert result.stdout.startswith("CALIBRATED  time x 1.")
    assert "before" in result.stdout
    assert "last third" in result.stdout


def test_calibrate_refuses_unknown_factor_and_missing_file(bench_file, tmp_path):
    runner = CliRunner()
    bad = runner.invoke(app, [str(bench_file), *FLAGS, "--fit", "speed"])
    assert isinstance(bad.exception, InputError)
    assert "factor 'speed' is unknown" in str(bad.exception)
    missing = runner.invoke(app, [str(tmp_path / "no.json"), *FLAGS])
    assert isinstance(missing.exception, InputError)
