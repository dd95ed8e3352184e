"""The shipped start-up logs are the evidence, and what `kvplan validate` says of them is what tests assert.

Source: ../shared/evidence/kv_sizing.jsonl.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from kvplan.memory.validate import GROUPINGS, check, log_rows, pool_errors, quantile, summarise
from tests.conftest import shared_path
from tests.memory import build_logs
from tests.memory.kv_rows import MISSES


@pytest.fixture(scope="module")
def outcomes():
    return [check(row) for row in log_rows()]


def test_shipped_logs_are_what_the_script_makes():
    """Every row of the evidence is in the file, changed only as build_logs.py says."""
    shared_path("evidence", "kv_sizing.jsonl")
    assert build_logs.TARGET.read_text(encoding="utf-8") == build_logs.text(), (
        "run python -m tests.memory.build_logs"
    )


def test_printed_figures_are_the_evidences():
    """Read without the script: what the file says was printed is what the source row holds."""
    evidence = {row["id"]: row for row in map(json.loads, shared_path("evidence", "kv_sizing.jsonl").open())}
    shipped = log_rows()
    assert [row.id for row in shipped] == list(evidence)
    for row in shipped:
        for name, value in row.printed.items():
            if name != "deciding_stage_kv_gib":
                assert value == evidence[row.id][name], (row.id, name)


def test_sources_name_project_and_thread_without_address():
    for row in log_rows():
        assert row.source
        assert "://" not in row.source
        assert "find_string" not in row.source


def test_right_and_wrong(outcomes):
    """Rows of test_evidence_layout.py and test_other_engines.py, and refused starts; misses as listed."""
    covered = [o for o in outcomes if o.right is not None]
    assert {o.row.id for o in covered if not o.right} == set(MISSES)
    assert (len(covered), sum(o.right for o in covered)) == (72, 67)
    assert all(o.row.remark for o in covered if not o.right)
    assert all(o.row.not_covered for o in outcomes if o.right is None)


def test_pool_errors_are_those_of_the_budget_tests(outcomes):
    """BUDGET.md's targets: 0.1 % and 0.5 % with all flags, 0.5 % and 3 % with version and utilisation."""
    stated, every = pool_errors(outcomes), pool_errors(outcomes, all_flags=True)
    assert (len(stated), len(every)) == (38, 30)
    assert quantile(every, 0.5) <= 0.05
    assert quantile(every, 0.9) <= 0.2
    assert quantile(stated, 0.5) <= 0.5
    assert quantile(stated, 0.9) <= 3.0


def test_a_wrong_layout_would_show(outcomes):
    """With fp8 KV instead of bf16 no uniform row stays right: the check can fail."""
    dense = [o.row for o in outcomes if o.right and o.row.kind == "GQA and MHA" and o.row.engine == "vllm"]
    bf16 = [row for row in dense if "kv_cache_dtype" not in row.flags]
    assert len(bf16) >= 25
    for row in bf16:
        assert check(replace(row, flags={**row.flags, "kv_cache_dtype": "fp8"})).right is False, row.id


@pytest.mark.parametrize("by", GROUPINGS)
def test_groups_hold_every_row_once(outcomes, by):
    groups = summarise(outcomes, by)
    assert sum(g.rows + g.not_covered for g in groups) == len(outcomes)
    assert sum(g.right for g in groups) == 67
    assert sum(g.pool_rows for g in groups) == 38


def test_quantiles():
    """Nearest rank above, the middle pair's mean for an even median: by hand."""
    assert quantile([], 0.5) is None
    assert quantile([1.0, 3.0], 0.5) == 2.0
    assert quantile([1.0, 2.0, 9.0], 0.5) == 2.0
    assert quantile([float(n) for n in range(1, 11)], 0.9) == 10.0
