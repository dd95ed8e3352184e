"""Facts about the public traces, from their columns with plain numpy.

Source of the expected values: the reference answers of the design notes (TRACE_FORMATS), computed
independently of this project. Utilisation is sum n / sum B ceil(n / B), n = input + output.
"""

from __future__ import annotations

import numpy as np
import pytest

from kvplan.trace.readers import read_trace
from kvplan.trace.schema import Trace
from tests.conftest import shared_path

FILES = {
    "azure": "AzureLLMInferenceTrace_conv_2023.csv",
    "mooncake": "mooncake_conversation_trace.jsonl",
    "sharegpt": "sarathi_sharegpt_8k_filtered_stats_llama2_tokenizer.csv",
}
BLOCKS = (8, 16, 32, 64, 128, 256)
UTILISATION = {
    "azure": (0.99745, 0.99456, 0.98878, 0.97794, 0.95624, 0.91983),
    "mooncake": (0.99972, 0.99940, 0.99876, 0.99746, 0.99488, 0.98986),
    "sharegpt": (0.99874, 0.99730, 0.99442, 0.98868, 0.97760, 0.95573),
}
POWER_OF_TWO = {"azure": 0.65423, "mooncake": 0.69640, "sharegpt": 0.72024}
LONGEST = {"azure": 0.09694, "mooncake": 0.09783, "sharegpt": 0.34099}
ROWS = {"azure": 19_366, "mooncake": 12_031, "sharegpt": 30_731}


@pytest.fixture(scope="module")
def traces() -> dict[str, Trace]:
    return {name: read_trace(str(shared_path("traces", file))) for name, file in FILES.items()}


@pytest.mark.parametrize("name", FILES)
def test_utilisation_at_six_block_sizes(name: str, traces: dict[str, Trace]) -> None:
    n = traces[name].input_tokens + traces[name].output_tokens
    assert len(n) == ROWS[name]
    found = [n.sum() / (size * -(-n // size)).sum() for size in BLOCKS]
    assert found == pytest.approx(UTILISATION[name], abs=5.1e-6)


@pytest.mark.parametrize("name", FILES)
def test_utilisation_of_reservations(name: str, traces: dict[str, Trace]) -> None:
    n = traces[name].input_tokens + traces[name].output_tokens
    assert n.sum() / (2 ** np.ceil(np.log2(n))).sum() == pytest.approx(POWER_OF_TWO[name], abs=5.1e-6)
    assert n.sum() / (len(n) * n.max()) == pytest.approx(LONGEST[name], abs=5.1e-6)


def test_totals_of_mooncake_conversation(traces: dict[str, Trace]) -> None:
    trace = traces["mooncake"]
    assert trace.input_tokens.sum() == 144_793_823
    assert trace.output_tokens.sum() == 4_122_048
    assert trace.input_tokens.max() == 126_195
    assert len(np.unique(trace.arrival_s)) == 1_180
    assert len(trace.segment_stream) == 288_500
    assert trace.provenance.sha256.startswith("b8cbb061a852")
    assert (
        np.add.reduceat(trace.segment_length, trace.segment_offsets[:-1]).tolist()
        == trace.input_tokens.tolist()
    )


def test_azure_times_keep_seven_digits(traces: dict[str, Trace]) -> None:
    """First and second row are 46.6805900 and 50.9951690 of one minute."""
    assert traces["azure"].arrival_s[:2].tolist() == pytest.approx([0.0, 4.314579], abs=1e-9)


def test_sharegpt_has_no_times(traces: dict[str, Trace]) -> None:
    assert not traces["sharegpt"].has_times
    assert traces["azure"].has_times
    assert not traces["azure"].has_content
