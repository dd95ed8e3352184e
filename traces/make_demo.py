"""Write traces/demo.jsonl: 400 constructed chat requests in our own format. Deterministic.

    python traces/make_demo.py > traces/demo.jsonl

Conversations of one to six turns arrive over about two minutes. Five system prompts are shared; each turn's
prompt contains all earlier turns and answers, so prefixes are shared between turns. Nothing here was recorded
anywhere.
"""

from __future__ import annotations

import json
import math
import random
import sys

SEED = 20261201
SYSTEM_PROMPTS = (180, 420, 750, 1200, 2100)  # tokens
REQUESTS = 400


def main() -> None:
    rng = random.Random(SEED)
    rows = []
    conversation = 0
    while len(rows) < REQUESTS:
        start_ms = rng.uniform(0, 120_000)
        system = rng.choices(range(len(SYSTEM_PROMPTS)), weights=(5, 4, 3, 2, 1))[0]
        segments = [[system, 0, SYSTEM_PROMPTS[system]]]
        for turn in range(rng.choices((1, 2, 3, 4, 5, 6), weights=(4, 4, 3, 2, 2, 1))[0]):
            question = max(4, min(3000, round(rng.lognormvariate(math.log(90), 1.1))))
            answer = max(2, min(1200, round(rng.lognormvariate(math.log(190), 0.8))))
            stream = 1000 + 20 * conversation + 2 * turn
            segments = [*segments, [stream, 0, question]]
            rows.append(
                {
                    "timestamp": round(start_ms),
                    "input_length": sum(length for _, _, length in segments),
                    "output_length": answer,
                    "segments": segments,
                    "output_stream": stream + 1,
                    "session_id": conversation,
                    "turn": turn,
                }
            )
            segments = [*segments, [stream + 1, 0, answer]]
            start_ms += 1000 * (2 + 0.02 * answer + rng.expovariate(1 / 6))
        conversation += 1
    rows = sorted(rows[:REQUESTS], key=lambda row: row["timestamp"])
    for i, row in enumerate(rows):
        head = {"id": f"demo-{i:03d}", "provenance": "constructed"} if i == 0 else {"id": f"demo-{i:03d}"}
        sys.stdout.write(json.dumps({**head, **row}, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
