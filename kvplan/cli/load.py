"""The load of a simulation: the flags that say which requests arrive, and when."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvplan.cli import render
from kvplan.cli.options import Flag
from kvplan.errors import InputError

if TYPE_CHECKING:
    from kvplan.trace.schema import Trace

DEFAULT_INPUT_LEN, DEFAULT_OUTPUT_LEN, DEFAULT_PROMPTS, DEFAULT_RATE = 1024, 128, 1000, 4.0


@dataclass(frozen=True)
class Load:
    """The flags that say which requests arrive, and when."""

    trace: str | None
    trace_format: str | None
    random_input_len: str | None
    random_output_len: str | None
    num_prompts: str | None
    random_range_ratio: str | None
    random_len_range: str | None
    seed: str
    request_rate: str | None
    burstiness: str | None
    max_concurrency: str | None
    speed_up: str | None

    @property
    def is_default(self) -> bool:
        """Nothing was said: a small constructed load, named among the assumptions."""
        return self.trace is None and self.random_input_len is None and self.random_output_len is None

    def number(self, name: str, kind: type, default: Any, low: float, high: float) -> Any:
        text = getattr(self, name)
        return default if text is None else Flag(name, kind, "", low=low, high=high).parse(text)

    def read(self, quiet: bool) -> tuple[Trace, int]:
        """The trace with its arrivals, and the closed loop's concurrency (0 = open)."""
        from kvplan.trace.generate import random_trace, speed_up, with_arrivals

        seed = self.number("seed", int, 0, 0, 2**63 - 1)
        rate = self._rate()
        burstiness = self.number("burstiness", float, 1.0, 1e-3, 1e6)
        concurrency = self.number("max_concurrency", int, 0, 1, 1 << 20)
        factor = self.number("speed_up", float, 1.0, 1e-9, 1e9)
        random = (
            "random_input_len",
            "random_output_len",
            "num_prompts",
            "random_range_ratio",
            "random_len_range",
        )
        if self.trace is not None:
            said = [f"--{name.replace('_', '-')}" for name in random if getattr(self, name) is not None]
            if said:
                raise InputError(f"TRACE {self.trace} and {said[0]} both give the load: use one.")
            from kvplan.trace.readers import read_trace

            requests = read_trace(self.trace, self.trace_format)
            for line in requests.notes:
                render.note(f"note: {line}", quiet)
        else:
            if self.trace_format is not None:
                raise InputError("--trace-format needs a TRACE.")
            if self.random_range_ratio is not None and self.random_len_range is not None:
                raise InputError("--random-range-ratio and --random-len-range both set the lengths: use one.")
            if rate is None and not concurrency:
                rate = DEFAULT_RATE if self.is_default else float("inf")
            requests = random_trace(
                self.number("num_prompts", int, DEFAULT_PROMPTS, 1, 100_000_000),
                self.number("random_input_len", int, DEFAULT_INPUT_LEN, 1, 1 << 28),
                self.number("random_output_len", int, DEFAULT_OUTPUT_LEN, 1, 1 << 28),
                seed=seed,
                range_ratio=self.number("random_range_ratio", float, 0.0, 0.0, 1.0),
                len_range=self._len_range(),
            )
        if len(requests) == 0:
            raise InputError(f"{requests.provenance.source} has no requests to simulate.")
        if int(requests.samples.max()) > 1:
            i = int(requests.samples.argmax())
            raise InputError(
                f"request {requests.request_id[i]}: n is {requests.samples[i]}; "
                "parallel samples are not simulated yet, only n = 1."
            )
        if rate is not None:
            requests = with_arrivals(requests, rate, burstiness, seed)
        elif concurrency and not requests.has_times:
            requests = with_arrivals(requests, float("inf"), 1.0, seed)
        elif not requests.has_times:
            raise InputError(
                f"{requests.provenance.source} has no arrival times.\n"
                "  Give --request-rate R (Poisson) or --max-concurrency C (closed loop)."
            )
        if burstiness != 1.0 and rate is None:
            raise InputError("--burstiness needs --request-rate.")
        return (speed_up(requests, factor) if factor != 1.0 else requests), concurrency

    def _rate(self) -> float | None:
        if self.request_rate is None:
            return None
        if self.request_rate.strip().lower() == "inf":
            return float("inf")
        return float(Flag("request_rate", float, "", low=1e-9, high=1e9).parse(self.request_rate))

    def _len_range(self) -> tuple[float, float] | None:
        if self.random_len_range is None:
            return None
        try:
            low, high = (float(part) for part in self.random_len_range.split(","))
        except ValueError:
            low = high = float("nan")
        if not 0 <= low <= high <= 1e6:
            raise InputError(f"--random-len-range is {self.random_len_range}; must be LO,HI such as 0.8,1.")
        return low, high


def all_at_once(requests: Trace) -> bool:
    return bool(requests.arrival_s[0] == requests.arrival_s[-1])
