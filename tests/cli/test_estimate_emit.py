"""`kvplan estimate --emit vllm`: the launch line, of flags that the version named accepts.

`vllm_flags.json` records which releases lack a flag, a KV dtype or an environment variable; it was read off
the releases it names, not off our table.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from kvplan.cli.app import main
from kvplan.cli.estimate_emit import ALWAYS, KV_DTYPES_SINCE, SINCE, accepted
from kvplan.spec.engine import KNOWN_VLLM, parse_version

RECORDED = json.loads((Path(__file__).parent / "vllm_flags.json").read_text(encoding="utf-8"))
RELEASES = [parse_version(text) for text in RECORDED["releases"]]


def run(capsys, *words: str) -> tuple[int, str, str]:
    code = main(["estimate", *words])
    out, err = capsys.readouterr()
    return code, out, err


def lacking(name: str) -> set[tuple[int, int]]:
    """Minor releases of which a recorded one lacks ``name``."""
    return {parse_version(text) for text in RECORDED["lacking"][name]}


@pytest.mark.parametrize("name", sorted(ALWAYS | set(SINCE)))
def test_a_flag_is_accepted_only_where_the_releases_have_it(name):
    """In each recorded release, and in known ones between: both recorded neighbours have the flag."""
    missing = lacking(name)
    for version in {*KNOWN_VLLM, *RELEASES}:
        if not accepted(name, version):
            continue
        older = max((r for r in RELEASES if r <= version), default=RELEASES[0])
        newer = min((r for r in RELEASES if r >= version), default=RELEASES[-1])
        assert older not in missing, (name, version, older)
        assert newer not in missing, (name, version, newer)


def test_every_flag_is_accepted_by_the_newest():
    """The table hides nothing: what 0.32.0 has is accepted there."""
    newest = RELEASES[-1]
    assert all(accepted(name, newest) for name in RECORDED["lacking"] if newest not in lacking(name))


@pytest.mark.parametrize("dtype", KV_DTYPES_SINCE)
def test_kv_dtypes_by_release(dtype):
    missing = {parse_version(text) for text in RECORDED["kv_cache_dtypes_lacking"][dtype]}
    assert not any(r in missing for r in RELEASES if r >= KV_DTYPES_SINCE[dtype])


FLAG_SETS = [
    (),
    ("-tp", "2", "-pp", "2", "-dp", "2", "--enable-expert-parallel"),
    (
        "--enforce-eager",
        "--no-enable-prefix-caching",
        "--block-size",
        "32",
        "--scheduling-policy",
        "priority",
    ),
    ("--kv-cache-dtype", "fp8", "--max-loras", "2", "--max-lora-rank", "32", "--dtype", "float16"),
    ("--num-gpu-blocks-override", "20000", "--long-prefill-token-threshold", "4096"),
    ("--speculative-model", "llama-3.2-1b", "--num-speculative-tokens", "3"),
    ("--async-scheduling", "--kv-offload-gib", "10", "--watermark", "0.01"),
    ("--no-scheduler-reserve-full-isl", "--prefix-cache-retention-interval", "none", "--model-runner", "v1"),
    ("--kv-cache-memory-bytes", "40G", "--kv-cache-dtype", "bf16", "--kv-cache-layout", "BLNHC"),
]


@pytest.mark.parametrize("version", ["0.9.2", "0.10.2", "0.12.0", "0.19.0", "0.26.0", "0.32.0"])
@pytest.mark.parametrize("words", FLAG_SETS)
def test_emitted_flags_are_those_of_the_release(capsys, version, words):
    """Every flag on the line is one the recorded release has; else the line is refused, never wrong."""
    common = ("llama-3.1-8b", "--max-model-len", "8192", "--engine-version", version, "--emit", "vllm")
    code, out, err = run(capsys, *common, *words)
    if code == 2:
        assert out == ""
        assert "certain from" in err or "exists from vLLM" in err
        assert parse_version(version) < (0, 29)  # the newest accepts them all
        return
    assert code == 0, err
    line = shlex.split(out.replace("\\\n", " "))
    names = [word for word in line if word.startswith("--")] + [
        w.split("=")[0] for w in line if w[:5] == "VLLM_"
    ]
    assert names
    for name in names:
        known = "--" + name[5:] if name.startswith("--no-") else name
        assert version not in RECORDED["lacking"][known], name


def test_the_line_pins_what_the_estimate_rests_on(capsys):
    """Length, share, requests and tokens a step are written out; it can be pasted and fits 80 columns."""
    code, out, err = run(capsys, "llama-3.3-70b-fp8", "-tp", "2", "--emit", "vllm")
    assert code == 0
    assert err.startswith("FITS  ")
    assert shlex.split(out.replace("\\\n", " ")) == [
        "vllm", "serve", "meta-llama/Llama-3.3-70B-Instruct", "--max-model-len", "131072",
        "--gpu-memory-utilization", "0.92", "--max-num-seqs", "1024", "--max-num-batched-tokens", "8192",
        "--quantization", "fp8", "--tensor-parallel-size", "2",
    ]  # fmt: skip
    assert max(map(len, out.splitlines())) <= 80


def test_a_checkpoint_named_in_its_format_needs_no_quantization(capsys):
    _, out, _ = run(capsys, "casperhansen/llama-3.3-70b-instruct-awq", "-tp", "2", "--emit", "vllm")
    assert out.startswith("vllm serve casperhansen/llama-3.3-70b-instruct-awq ")
    assert "--quantization" not in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("llama-3.3-70b", "--quantization", "awq", "-tp", "2"), "does not make awq weights"),
        (("--layers", "2", "--kv-heads", "2", "--head-dim", "64"), "needs a MODEL"),
        (("llama-3.1-8b", "--engine", "sglang"), "--engine sglang"),
        (("llama-3.1-8b", "--max-loras", "1", "--max-lora-rank", "24"), "--max-lora-rank 24"),
        (("llama-3.1-8b", "--explain"), "one launch line"),
        (("llama-3.1-8b", "--sweep", "tp=1,2"), "one launch line"),
    ],
)
def test_what_cannot_be_emitted_is_refused(capsys, words, message):
    code, out, err = run(capsys, *words, "--emit", "vllm")
    assert (code, out) == (2, "")
    assert message in err


def test_no_line_for_what_does_not_start(capsys):
    code, out, err = run(capsys, "llama-3.3-70b", "--emit", "vllm")
    assert (code, out) == (1, "")
    assert err.startswith("DOES NOT FIT")


def test_other_engines_are_not_offered(capsys):
    code, _, err = run(capsys, "llama-3.1-8b", "--emit", "sglang")
    assert code == 2
    assert "only vllm" in err
