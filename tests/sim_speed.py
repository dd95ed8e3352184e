"""Speed of the scheduler and the simulator: `make bench-sim`. Prints ratios of one run, asserts nothing.

    python tests/sim_speed.py [PART ...]     parts: keys core trace scale sweep; all without any

Everything is compiled before it is timed. Figures of other programs are not taken here: vLLM 0.32's own
scheduler needed 60 s for t_10k on a quiet two-core machine (../shared/oracle/README.md).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kvplan.sched.core import Rules
from kvplan.sim.run import keys_for, simulate, steps_clock
from kvplan.trace.generate import random_trace
from kvplan.trace.readers import read_trace
from tests.conftest import SHARED
from tests.sched import reference_scheduler as reference
from tests.sched.oracle import native_trace
from tests.sched.reference_replay import read_requests

T_10K = Rules(
    num_blocks=30_000,
    block_size=16,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    max_model_len=131_072,
    chunked_prefill=True,
    long_prefill_token_threshold=0,
    lone_request_exempt=True,
    prefix_caching=True,
    priority=False,
    watermark_blocks=0,
    reserve_full_isl=True,
    unhashed_to_front=True,
    shift_by_position=True,
    asynchronous=False,
    max_concurrency=0,
    record=False,
)
MOONCAKE = SHARED / "traces" / "mooncake_conversation_trace.jsonl"


def timed(call: Callable[[], Any], repeat: int = 3) -> tuple[float, Any]:
    """(fastest of ``repeat`` seconds, the last result)."""
    best = float("inf")
    for _ in range(repeat):
        start = time.perf_counter()
        result = call()
        best = min(best, time.perf_counter() - start)
    return best, result


def say(what: str, figure: str) -> None:
    print(f"{what:58} {figure}", flush=True)


def t_10k() -> Any:
    with tempfile.TemporaryDirectory() as folder:
        path = native_trace(SHARED / "oracle" / "traces" / "t_10k.jsonl", Path(folder) / "t_10k.jsonl")
        return read_trace(str(path))


def keys() -> None:
    trace = t_10k()
    keys_for(trace, T_10K)
    seconds, made = timed(lambda: keys_for(trace, T_10K))
    say("t_10k: content keys", f"{seconds:.3f} s for {len(made.stored):,} blocks")


def core() -> None:
    trace = t_10k()
    simulate(trace, T_10K, steps_clock())
    seconds, run = timed(lambda: simulate(trace, T_10K, steps_clock()))
    say("t_10k: keys and run", f"{seconds:.3f} s, {len(trace) / seconds:,.0f} requests/s")
    say("t_10k: steps, most running", f"{int(run.count['steps']):,}, {int(run.count['peak_running'])}")
    requests = list(read_requests("t_10k.jsonl", 16))
    settings = reference.Settings(30_000, 16, 256, 8192, 131_072)
    slow_s, steps = timed(lambda: reference.simulate(settings, requests), 1)
    say("t_10k: plain-Python reference", f"{slow_s:.1f} s for {len(steps):,} steps")
    say("t_10k: compiled over plain Python, keys included", f"{slow_s / seconds:,.0f} x")


def peak_mib(*argv: str) -> tuple[float, float]:
    """(wall seconds, peak memory in MiB) of one kvplan command in a process of its own."""
    code = (
        "import resource, sys; from kvplan.cli.app import main; main(sys.argv[1:])\n"
        "scale = 1 << 20 if sys.platform == 'darwin' else 1 << 10\n"
        "sys.stderr.write(f'\\n{resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / scale}')"
    )
    start = time.perf_counter()
    done = subprocess.run([sys.executable, "-c", code, *argv], capture_output=True, text=True, check=True)
    return time.perf_counter() - start, float(done.stderr.splitlines()[-1])


def trace() -> None:
    def parse() -> None:
        with MOONCAKE.open() as lines:
            for line in lines:
                json.loads(line)

    parse_s, _ = timed(parse)
    read_s, _ = timed(lambda: read_trace(str(MOONCAKE)))
    say("Mooncake conversation: parse the JSON, no more", f"{parse_s:.2f} s")
    say("Mooncake conversation: read the trace", f"{read_s:.2f} s, {read_s / parse_s:.1f} x parsing")
    with tempfile.TemporaryDirectory() as folder:
        wall_s, peak = peak_mib("simulate", str(MOONCAKE), "-o", f"{folder}/run", "--format", "json")
    ratio = f"{wall_s / parse_s:.1f} x parsing, peak {peak:.0f} MiB"
    say("Mooncake conversation: the whole command, with -o", f"{wall_s:.2f} s, {ratio}")


def scale() -> None:
    rules = T_10K._replace(max_model_len=1 << 20)
    smallest = 0.0
    for n in (10_000, 100_000, 1_000_000):
        load = random_trace(n, 498, 150, seed=0, range_ratio=0.9, request_rate=30.0)
        if n == 10_000:
            simulate(load, rules, steps_clock())
        seconds, _ = timed(lambda load=load: simulate(load, rules, steps_clock()), 1 if n > 100_000 else 2)
        smallest = smallest or seconds
        linear = seconds / smallest / (n / 10_000)
        say(f"{n:,} constructed requests, a second a step", f"{seconds:.2f} s, {linear:.2f} x linear")
    flags = "--random-input-len 498 --random-output-len 150 --random-range-ratio 0.9 --request-rate 30"
    pool = "--num-gpu-blocks-override 30000 --max-num-seqs 256"
    wall_s, peak = peak_mib("simulate", "--num-prompts", "1000000", *flags.split(), *pool.split())
    say("1,000,000 constructed requests, the whole command", f"{wall_s:.2f} s, peak {peak:.0f} MiB")


def sweep() -> None:
    sizes = ["--block-size", "16", "--block-size", "32"]
    one_s = sum(peak_mib("simulate", str(MOONCAKE), *sizes[i : i + 2])[0] for i in (0, 2))
    both_s, _ = peak_mib("simulate", str(MOONCAKE), *sizes)
    say("two block sizes in one command", f"{both_s:.2f} s, {one_s / both_s:.2f} x faster than two commands")


PARTS = {"keys": keys, "core": core, "trace": trace, "scale": scale, "sweep": sweep}


def main() -> None:
    if not SHARED.exists():
        sys.exit("needs ../shared (traces and records beside the checkout), or KVPLAN_SHARED=DIR")
    say("cores", str(os.cpu_count()))
    for part in sys.argv[1:] or PARTS:
        PARTS[part]()


if __name__ == "__main__":
    main()
