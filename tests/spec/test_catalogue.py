"""Claim: names resolve as the command line promises, to shipped data that the facts make."""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from pathlib import Path

import pytest

from kvplan.errors import InputError
from kvplan.spec.catalogue import (
    DEFAULT_GPU,
    DEFAULT_MODEL,
    base_name,
    find_gpu,
    find_model,
    gpus,
    model_entries,
)
from kvplan.spec.gpu import GIB
from tests.conftest import shared_path
from tests.spec import build_catalogue

ROOT = Path(__file__).resolve().parents[2]


def test_shipped_data_is_what_the_script_makes_of_the_facts() -> None:
    facts = shared_path("facts")
    for name, made in (("models", build_catalogue.models(facts)), ("gpus", build_catalogue.gpus(facts))):
        shipped = (ROOT / "kvplan" / "spec" / "data" / f"{name}.json").read_text(encoding="utf-8")
        assert shipped == build_catalogue.text_of(made), f"run tests/spec/build_catalogue.py ({name})"


# ---- models -----------------------------------------------------------------------------------------

# What is typed, the entry, the quantisation that the name stands for (CLI.md, "Shared flags"; UX.md).
NAMES: list[tuple[str, str, str | None]] = [
    ("llama-3.3-70b", "meta-llama/Llama-3.3-70B-Instruct", None),
    ("llama-3.3-70b-fp8", "meta-llama/Llama-3.3-70B-Instruct", "fp8"),
    ("nvidia/Llama-3.3-70B-Instruct-FP8", "meta-llama/Llama-3.3-70B-Instruct", "fp8"),
    ("qwen3-32b", "Qwen/Qwen3-32B", None),
    ("QWEN3-32B", "Qwen/Qwen3-32B", None),
    ("qwen3-32b-fp8", "Qwen/Qwen3-32B-FP8", None),  # an entry of its own, stored so
    ("nvidia/Qwen3-32B-NVFP4", "Qwen/Qwen3-32B", "modelopt_fp4"),
    ("Qwen3-14B-AWQ", "Qwen/Qwen3-14B", "awq"),
    ("Qwen/Qwen2.5-7B-Instruct-GPTQ-Int4", "Qwen/Qwen2.5-7B-Instruct", "gptq"),
    ("Qwen2.5-7B-AWQ-INT4", "Qwen/Qwen2.5-7B-Instruct", "awq"),
    ("gemma-3-27b", "google/gemma-3-27b-it", None),
    ("google/gemma-3-27b-it", "google/gemma-3-27b-it", None),
    ("gpt-oss-20b", "openai/gpt-oss-20b", None),
    ("Meta-Llama-3-8B-Instruct", "meta-llama/Meta-Llama-3-8B", None),
    ("meta-llama/Meta-Llama-3.1-8B", "meta-llama/Llama-3.1-8B", None),
    ("meta-llama/Llama-2-7b-chat-hf", "meta-llama/Llama-2-7b-hf", None),
    ("RedHatAI/Llama-3.1-70B-Instruct-fp8-dynamic", "meta-llama/Llama-3.1-70B", "compressed-tensors"),
    ("RedHatAI/Meta-Llama-3.1-8B-Instruct-quantized.w4a16", "meta-llama/Llama-3.1-8B", "compressed-tensors"),
    ("Meta-Llama-3-70B-Instruct-AWQ", "meta-llama/Meta-Llama-3-70B", "awq"),
    ("nvidia/DeepSeek-R1-NVFP4", "deepseek-ai/DeepSeek-R1", "modelopt_fp4"),
    ("DeepSeek-R1-FP8", "deepseek-ai/DeepSeek-R1", None),  # stored in 8 bit already
    ("zai-org/GLM-5.1-FP8", "zai-org/GLM-5.1", "fp8"),
    ("Qwen3.8-27B-Text-MTP-NVFP4", "Qwen/Qwen3.8-27B", "modelopt_fp4"),
]


@pytest.mark.parametrize(("typed", "entry", "implied"), NAMES)
def test_names_resolve(typed: str, entry: str, implied: str | None) -> None:
    found = find_model(typed)
    assert found.spec.name == entry
    assert found.implied_quantization == implied
    if found.resolved_from is not None:
        assert found.resolved_from == typed
        assert entry in found.notes[0]
        assert implied is None or f"--quantization {implied}" in found.notes[0]
    if implied is not None:
        assert found.spec.quantization is not None
        assert found.spec.quantization.method == implied


def test_a_quantization_flag_wins_over_the_name() -> None:
    found = find_model("llama-3.3-70b-fp8", quantization="awq")
    assert found.implied_quantization is None
    assert found.spec.quantization is not None
    assert found.spec.quantization.method == "awq"
    plain = find_model("llama-3.3-70b-fp8", quantization="none")
    assert plain.spec.quantization is None


def test_w4a16_is_four_bits_and_w8a8_eight() -> None:
    bits = [find_model(f"llama-3.1-8b-quantized.{kind}").spec.quantization for kind in ("w4a16", "w8a8")]
    assert [each.bits for each in bits if each] == [4, 8]


def test_words_are_dropped_wherever_they_stand_but_only_whole() -> None:
    assert base_name("Llama-3.1-Instruct-8B") == ("llama-3.1-8b", None)
    assert base_name("gemma-italic-2b") == ("gemma-italic-2b", None)
    assert base_name("owner/Some_Model-FP8-Chat") == ("some-model", "fp8")


def test_default_names_resolve() -> None:
    assert find_model(DEFAULT_MODEL).spec.name == "meta-llama/Llama-3.1-8B"
    assert find_gpu(DEFAULT_GPU).name == "H100 SXM"


def test_unknown_names_get_near_ones() -> None:
    with pytest.raises(InputError) as caught:
        find_model("lama-3.3-70b")
    first, hint = str(caught.value).splitlines()
    assert first == "MODEL 'lama-3.3-70b' is neither in the catalogue nor a path; pass its config.json."
    assert hint.startswith("  Nearest: llama-3.3-70b")
    assert hint.endswith("kvplan models llama")


@pytest.mark.parametrize("typed", ["", "/", "-", "x" * 5000, "../no", "\x00", "☃", "no/config.json"])
def test_odd_names_are_input_errors(typed: str) -> None:
    with pytest.raises(InputError):
        find_model(typed)


def test_paths_resolve_to_their_config(tmp_path: Path) -> None:
    raw = shared_path("facts", "configs", "meta-llama--Meta-Llama-3.1-8B.json").read_bytes()
    folder = tmp_path / "my-llama"
    folder.mkdir()
    (folder / "config.json").write_bytes(raw)
    for typed in (folder, folder / "config.json"):
        found = find_model(str(typed))
        assert (found.spec.name, found.resolved_from) == ("my-llama", None)
        assert found.spec.kv_elements_per_token == 65536
    assert find_model(str(folder), quantization="fp8").spec.quantization is not None


def test_a_folder_called_like_a_model_counts_only_with_a_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "qwen3-32b").mkdir()
    assert find_model("qwen3-32b").spec.name == "Qwen/Qwen3-32B"
    (tmp_path / "mine").mkdir()
    with pytest.raises(InputError, match=r"mine: no such file, or no config\.json in it"):
        find_model("mine")
    raw = shared_path("facts", "configs", "mlc-preset--llama2_7b.json").read_bytes()
    (tmp_path / "qwen3-32b" / "config.json").write_bytes(raw)
    assert find_model("qwen3-32b").spec.num_layers == 32


def test_every_name_and_alias_of_the_catalogue_resolves_to_its_own_entry() -> None:
    names = [(entry.id, entry.id) for entry in model_entries()]
    names += [(alias, entry.id) for entry in model_entries() for alias, _ in entry.aliases]
    assert len({name.lower() for name, _ in names}) == len(names)
    for name, entry in names:
        if "DeepSeek-V4" not in name:
            assert find_model(name).spec.name == entry, name


# Names in the evidence that no entry stands for, and why.
UNKNOWN = {
    "DeepSeek-V4-Flash": "compressed attention: refused by name",
    "DeepSeek-V4-Flash-0731": "compressed attention",
    "DeepSeek-V4-Flash-Base": "compressed attention",
    "GLM-5.3-Flash": "KDA and sparse MLA, layer pattern not published here",
    "CosyVoice2-0.5B": "speech model",
    "Llama-3.2-11B-Vision": "cross-attention layers",
    "Zamba2-2.7B": "shared attention blocks",
    "MiMo-V2.6-Flash-MOPD": "shape not found",
    "Ministral-3-14B-Instruct-2512": "shape not found",
    "Qwen1.5-7B (sft)": "somebody's own tuning",
    "Qwen3.5 small (24 layers, 6 full)": "not a name",
    "gemma-4 (size not stated)": "not a name",
    "gemma-4-31B FP8-block": "not a name: a recipe in words",
    "nemotron_llm (32 layers x 8 kv x 128)": "not a name",
    "Nemotron-3-Nano-30B-A3B (hybrid Mamba MoE)": "not a name: a remark is attached",
    "Llama-3.1-405B FP8 amd": "not a name", "Llama-3.1-405B FP8 meta": "not a name",
    "Llama-3.1-405B-Instruct-FP8 (amd Quark KV ckpt)": "not a name",
    "Llama-3.1-405B-Instruct-FP8 (meta ckpt)": "not a name",
    "Qwen3.5-122B-A10B int4 AutoRound": "not a name",
    "Qwen3.6-27B-AutoRound-int4": "a format that CLI.md does not drop",
    "Qwen3.5-122B-A10B-NVFP4 (Sehyo)": "not a name", "Qwen3.5-122B-A10B-NVFP4 resharded": "not a name",
}  # fmt: skip


def evidence_names() -> set[str]:
    names = set()
    for parts in (("kv_sizing.jsonl",), ("serving", "reported_runs.jsonl")):
        lines = shared_path("evidence", *parts).read_text().splitlines()
        names |= {json.loads(line)["model"] for line in lines}
    with shared_path("evidence", "serving", "measured_points.csv").open(newline="") as stream:
        names |= {row["model_path"] for row in csv.DictReader(stream)}
    return {name for name in names if name}


def test_every_model_of_the_evidence_resolves_or_is_listed() -> None:
    unresolved = set()
    for name in evidence_names():
        try:
            find_model(name)
        except InputError:
            unresolved.add(name.rsplit("/", 1)[-1])
    assert unresolved == set(UNKNOWN)
    assert len(evidence_names()) - len(unresolved) >= 70


# ---- GPUs -------------------------------------------------------------------------------------------

# Name, GiB that the driver reports (BUDGET.md section 1; gpus.json), memory GB/s.
CARDS = [
    ("h100", "H100 SXM", 79.19, 3350),
    ("NVIDIA H100 80GB HBM3", "H100 SXM", 79.19, 3350),
    ("H100-80GB", "H100 SXM", 79.19, 3350),
    ("h100_sxm", "H100 SXM", 79.19, 3350),
    ("h100-pcie", "H100 PCIe", 79.19, 2000),
    ("h200", "H200 SXM", 139.84, 4800),
    ("NVIDIA H200", "H200 SXM", 139.84, 4800),
    ("a100", "A100-SXM4-80GB", 79.15, 2039),
    ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB", 79.15, 2039),
    ("A100-40GB", "A100-SXM4-40GB", 39.5, 1555),
    ("NVIDIA A100 80GB PCIe", "A100-PCIE-80GB", 79.15, 1935),
    ("rtx4090", "RTX 4090", 23.53, 1008),
    ("NVIDIA GeForce RTX 4090", "RTX 4090", 23.53, 1008),
    ("rtx-5090", "RTX 5090", 31.37, 1792),
    ("mi300x", "MI300X", 191.69, 5300),
    ("AMD Instinct MI300X", "MI300X", 191.69, 5300),
    ("b200", "B200", 178.35, 7700),
    ("l40s", "L40S", 44.39, 864),
    ("Tesla T4", "T4", 15.0, 320),
    ("gb10", "DGX Spark GB10", 121.7, 273),
    ("H100-SXM-80GB", "H100 SXM", 79.19, 3350),  # the size may be appended
    ("A100-SXM-80GB", "A100-SXM4-80GB", 79.15, 2039),
    ("MI355X 288GB", "MI355X", 268.2, 8000),
    ("GB10 (DGX Spark)", "DGX Spark GB10", 121.7, 273),
]


@pytest.mark.parametrize(("typed", "name", "gib", "gb_s"), CARDS)
def test_gpu_names_resolve(typed: str, name: str, gib: float, gb_s: float) -> None:
    gpu = find_gpu(typed)
    assert gpu.name == name
    assert gpu.total_bytes / GIB == pytest.approx(gib, abs=0.08)
    assert gpu.memory_bandwidth == gb_s * 1e9


def test_every_gpu_of_the_facts_is_there_with_sane_figures() -> None:
    rows = json.loads(shared_path("facts", "gpus.json").read_text())["gpus"]
    assert [gpu.name for gpu in gpus()] == [row["name"] for row in rows]
    assert len(gpus()) == 49
    for gpu, row in zip(gpus(), rows, strict=True):
        assert 0.9 < gpu.total_bytes / (row["memory_gb_marketing"] * 1e9) < 1.12, gpu.name
        assert gpu.memory_bandwidth > 1e11
        assert all(value > 1e12 for value in gpu.peak_flops.values())
        for alias in (gpu.name, *gpu.aliases):
            assert find_gpu(alias) is gpu, alias


def test_total_is_marked_where_no_driver_figure_was_found() -> None:
    marked = {gpu.name for gpu in gpus() if "total_bytes" in gpu.unverified}
    assert "T4" in marked
    assert not marked & {"H100 SXM", "H200 SXM", "A100-SXM4-80GB", "RTX 4090", "B200", "MI300X", "L40S"}


# Cards of the evidence that no entry stands for.
UNKNOWN_CARDS = {
    "RTX 2060 12GB", "RTX A5000 24GB", "RTX PRO 5000 72GB", "RTX 5060 Ti 16GB", "Radeon 890M iGPU",
    "MI300X (not named in excerpt: ROCm PR)", "MI300X class (not named in excerpt)", "A100-SXM (single)",
}  # fmt: skip


def test_every_gpu_of_the_evidence_resolves_or_is_listed() -> None:
    names = set()
    for parts in (("kv_sizing.jsonl",), ("serving", "reported_runs.jsonl")):
        lines = shared_path("evidence", *parts).read_text().splitlines()
        names |= {json.loads(line)["gpu"] for line in lines}
    with shared_path("evidence", "serving", "measured_points.csv").open(newline="") as stream:
        names |= {row["system"] for row in csv.DictReader(stream)}
    unresolved = set()
    for name in names - {None}:
        try:
            find_gpu(name)
        except InputError:
            unresolved.add(name)
    assert unresolved == UNKNOWN_CARDS


def test_a_size_that_is_not_the_cards_is_not_ignored() -> None:
    with pytest.raises(InputError):
        find_gpu("h100-40gb")


def test_unknown_gpu_gets_near_ones() -> None:
    with pytest.raises(InputError, match=r"--gpu 'h1000' is not in the catalogue.*\n  Nearest: H100"):
        find_gpu("h1000")


# ---- start-up ---------------------------------------------------------------------------------------


def test_a_lookup_needs_no_numpy_and_little_time() -> None:
    """The whole lookup in a fresh process, imports apart, stays well below what a user notices."""
    code = (
        "import sys, time; from kvplan.spec.catalogue import find_gpu, find_model\n"
        "start = time.perf_counter(); find_gpu('h100'); find_model('llama-3.3-70b-fp8')\n"
        "print(time.perf_counter() - start)\n"
        "heavy = ('numpy', 'pandas', 'torch', 'numba', 'pyarrow', 'rich')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    command = [sys.executable, "-c", code]
    runs = [
        subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
        for _ in range(3)
    ]
    assert all(heavy == "[]" for _, heavy in runs)
    assert min(float(seconds) for seconds, _ in runs) < 0.06
