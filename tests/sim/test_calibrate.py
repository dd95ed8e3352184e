"""Calibration: known factors are found again, files read and refused, the recorded run meets its target."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from kvplan.bench.recorded_run import compare, read_recorded, simulate_recorded
from kvplan.errors import InputError
from kvplan.sim.calibrate import Fit, Measured, fit_runs, fit_time, load, save
from kvplan.sim.measured import read_measured
from kvplan.sim.rules import rules_for
from kvplan.sim.run import simulate
from kvplan.sim.steptime import Calibration, clock_for
from kvplan.sim.tables import request_times
from kvplan.spec.catalogue import find_gpu, find_model
from kvplan.spec.engine import EngineSettings, resolve
from kvplan.trace.generate import random_trace
from tests.conftest import shared_path

MODEL, GPU = find_model("meta-llama/Llama-3.1-8B").spec, find_gpu("H100 SXM")
SETTINGS = EngineSettings(max_model_len=8192, enable_prefix_caching=False, num_gpu_blocks_override=4000)
ENGINE = resolve(SETTINGS, MODEL, GPU)
RULES = rules_for(ENGINE, 4000, 16)


def clock(calibration: Calibration):
    settings = replace(
        SETTINGS, max_num_batched_tokens=ENGINE.max_num_batched_tokens, max_num_seqs=ENGINE.max_num_seqs
    )
    return clock_for(MODEL, GPU, settings, calibration)


def made_run(truth: Calibration, rate: float = 12.0) -> Measured:
    """A run of a machine with these factors, as if measured."""
    trace = random_trace(200, 900, 200, seed=3, range_ratio=0.5, request_rate=rate)
    times = request_times(simulate(trace, RULES, clock(truth)))
    return Measured(trace, times.ttft_s, times.tpot_s, source="made")


def test_one_factor_is_found_again():
    """Given a machine 20 % slower in everything; expected: time = 1.2 and errors near zero, held out too."""
    fit = fit_runs([(made_run(Calibration(time=1.2)), RULES)], clock, ("time",))
    assert fit.calibration.time == pytest.approx(1.2, rel=0.02)
    assert fit.before > 0.1
    assert fit.after < 0.02
    assert fit.held_out < 0.03 < fit.held_out_before


def test_two_factors_bring_the_error_down_and_stay_near_their_priors():
    """Two loads of one machine: latencies are met; the factors, which trade with each other, only roughly."""
    truth = Calibration(weights=0.85, flops=0.8)
    fit = fit_runs(
        [(made_run(truth), RULES), (made_run(truth, rate=2.0), RULES)], clock, ("weights", "flops")
    )
    assert fit.after < 0.03 < fit.before
    assert 0.7 < fit.calibration.weights < 1.0
    assert 0.6 < fit.calibration.flops < 1.0
    assert fit.evaluations < 100


def test_unknown_factor_is_refused():
    with pytest.raises(InputError, match="factor 'speed' is unknown"):
        fit_runs([(made_run(Calibration()), RULES)], clock, ("speed",))


def test_fit_time_meets_a_known_factor():
    """End-to-end times proportional to the factor: 1 / 0.8 in a handful of evaluations."""
    arrival = np.zeros(5)
    took = np.array([1.0, 2.0, 3.0, 4.0, 5.0])
    assert fit_time(lambda f: took * f, took * 1.25, arrival) == pytest.approx(1.25, rel=1e-3)


def test_recorded_run_within_ten_percent_and_two_after_one_coefficient():
    """vLLM 0.19 on an RTX 4090, 300 requests, 2,588 blocks (evidence/runs); targets of the fidelity issue.

    The factor sees the first 100 requests only; figures are those of all (uncalibrated) or the other 200.
    """
    recorded = read_recorded(shared_path("evidence", "runs"))
    plain = compare(recorded, simulate_recorded(recorded))
    third = 100
    factor = fit_time(
        lambda time: simulate_recorded(recorded, Calibration(time=time)).requests.finish_s[:third],
        recorded.last_token_s[:third],
        recorded.trace.arrival_s[:third],
    )
    fitted = compare(recorded, simulate_recorded(recorded, Calibration(time=factor)), first=third)
    for name in ("throughput", "makespan", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"):
        assert abs(plain[name]) < 0.10, name
        assert abs(fitted[name]) < 0.02, name
    assert fitted["running, mean abs"] < 1.0
    assert fitted["waiting, mean abs"] < 1.5
    assert fitted["KV use, mean abs"] < 0.03


def test_calibration_file_comes_back_as_written(tmp_path):
    fit = Fit(Calibration(time=0.93, kv=1.1), 0.1, 0.01, 0.1, 0.02, 9)
    path = tmp_path / "cal.json"
    save(path, fit, {"gpu": "RTX 4090"})
    assert load(path) == (fit.calibration, {"gpu": "RTX 4090"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{}", "is not a calibration"),
        ("no json", "is not a calibration"),
        ('{"calibration": {"time": "x"}}', "is not a calibration"),
        ('{"calibration": {"haste": 1}}', "factor 'haste' is unknown"),
        ('{"calibration": {"time": -1}}', "must lie between"),
    ],
)
def test_bad_calibration_files_are_refused(tmp_path, text, message):
    path = tmp_path / "cal.json"
    path.write_text(text)
    with pytest.raises(InputError, match=message):
        load(path)


def test_missing_calibration_file_is_refused(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        load(tmp_path / "none.json")


def bench_result(**changes) -> dict:
    """A result as `vllm bench serve --save-result --save-detailed` writes it (keys of vllm 0.19)."""
    return {
        "request_rate": "inf", "burstiness": 1.0, "max_concurrency": 2,
        "input_lens": [10, 20, 30], "output_lens": [3, 1, 5], "ttfts": [0.1, 0.2, 0.3],
        "itls": [[0.01, 0.03], [], [0.02] * 4],
    } | changes  # fmt: skip


def test_bench_result_is_read(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(bench_result()))
    m = read_measured(path)
    assert m.max_concurrency == 2
    assert m.trace.input_tokens.tolist() == [10, 20, 30]
    assert m.ttft_s.tolist() == [0.1, 0.2, 0.3]
    assert m.tpot_s == pytest.approx([0.02, np.nan, 0.02], nan_ok=True)


def test_bench_result_with_start_times_is_put_in_order(tmp_path):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(bench_result(start_times=[105.0, 100.0, 102.0])))
    m = read_measured(path)
    assert m.max_concurrency == 0
    assert m.trace.arrival_s.tolist() == [0.0, 2.0, 5.0]
    assert m.trace.input_tokens.tolist() == [20, 30, 10]
    assert m.ttft_s.tolist() == [0.2, 0.3, 0.1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"ttfts": []}, "'ttfts' is missing"), ({"ttfts": [0.1]}, "differ in length")],
)
def test_incomplete_bench_results_are_refused(tmp_path, changes, message):
    path = tmp_path / "bench.json"
    path.write_text(json.dumps(bench_result(**changes)))
    with pytest.raises(InputError, match=message):
        read_measured(path)
