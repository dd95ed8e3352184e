"""How a refusal looks: the shortage in one number, then fixes in that same unit, to be summed by eye."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from kvplan.cli import render
from kvplan.cli.estimate_view import blocks_in_words, subject
from kvplan.cli.numbers import GIB, byte_size, count, fixed, gib, round_parts
from kvplan.cli.render import Column, Terminal
from kvplan.memory.capacity import Estimate
from kvplan.memory.fixes import Fix


def refused_view(e: Estimate, enough: Sequence[Fix], short: Sequence[Fix], term: Terminal) -> list[str]:
    """Blocks of text below the verdict of a set-up that does not start."""
    blocks = [render.wrap(f"{subject(e)}, GiB per GPU:", term.width + 1), ""]
    blocks.append(_need_table(e, term))
    blocks.append("")
    if not enough and not short:
        blocks.append("No single change of flags, weights or KV format makes it fit.")
        return blocks
    blocks += [_fix_table(e, enough, short, term)]
    return blocks


def _need_table(e: Estimate, term: Terminal) -> str:
    length, layout, b = e.engine.max_model_len, e.layout, e.budget
    one = layout.startup_bytes(length)
    own = " (its own maximum)" if length == e.model.max_position_embeddings else ""
    if layout.is_uniform:
        null = " + 1 block" if layout.null_block_counts else ""
        request_why = f"{count(length)} tokens{own} x {byte_size(layout.bytes_per_token)}{null}"
    else:
        request_why = f"{count(layout.blocks_per_request(length))} blocks at {count(length)} tokens{own}"
    rows: list[tuple[str, float, str]] = []
    if b is not None:
        rows.append(("weights", b.weights.bytes, b.weights.why))
        rows.append(("engine", b.engine_bytes, ""))
    states = e.verdict.running_state_bytes
    if states:
        why = f"max_num_seqs {count(e.engine.max_num_seqs)} x {byte_size(layout.bytes_per_block)}"
        rows.append(("states", states, why))
    else:
        rows.append(("one request", one, request_why))
    if b is not None:
        rows.append(
            (
                "budget",
                -b.budget_bytes,
                _budget_why(e),
            )
        )
    else:
        rows.append(("KV pool", -e.available_kv_bytes, blocks_in_words(e)))
    total = round(sum(size for _, size, _ in rows) / GIB, 2)
    shown = {name: round(size / GIB, 2) for name, size, _ in rows}
    whys = {name: why for name, _, why in rows}
    if b is not None:
        # The engine's share takes up the rounding, so that the rows add up and all else is as in the verdict.
        shown["engine"] = round(total - sum(size for name, size in shown.items() if name != "engine"), 2)
        parts = [x / GIB for x in (b.activation.bytes, b.non_torch.bytes, b.cuda_graphs.bytes)]
        engine = round_parts(parts, 2, shown["engine"])
        whys["engine"] = f"activation {engine[0]:.2f}, non-torch {engine[1]:.2f}, graphs {engine[2]:.2f}"
    body = [[name, fixed(shown[name]), whys[name]] for name in shown]
    before = -e.available_kv_bytes
    why = f"{gib(before)} of it before any KV" if before > 0 else ""
    if b is not None and 0 < total * GIB < b.band_bytes:
        why = f"less than the ± {gib(b.band_bytes)} of this estimate"
    body.append(["short by" if total > 0 else "spare", fixed(abs(total)), why if total > 0 else ""])
    columns = [Column("need", "left"), Column("GiB"), Column("why", "left", shrinks=True, min_width=20)]
    return render.table(columns, body, term)


def _budget_why(e: Estimate) -> str:
    fraction, name = e.engine.gpu_memory_utilization, e.engine.facts.fraction_name
    if e.engine.settings.engine == "tensorrt-llm":
        return f"{e.gpu.total_gib:.2f} less {1 - fraction:.2g} of what is free"
    return f"{e.gpu.total_gib:.2f} x {name} {fraction:.2f}"


def _fix_table(e: Estimate, enough: Sequence[Fix], short: Sequence[Fix], term: Terminal) -> str:
    short_by = round(e.verdict.short_by_bytes / GIB, 2)
    columns = [
        Column("change", "left"),
        Column("GPUs"),
        Column("gains GiB"),
        Column("spare"),
        Column("longest", optional=1),
        Column("at once", optional=2),
    ]

    def row(fix: Fix) -> list[str]:
        at_once = fixed(fix.at_once) if fix.fits else "no"
        mark = "~ " if fix.alters_answers else "  "
        return [
            mark + fix.label,
            str(fix.gpus),
            fixed(round(fix.spare_bytes / GIB, 2) + short_by),  # gains - short by = spare, as shown
            gib(fix.spare_bytes),
            count(fix.longest_tokens),
            at_once,
        ]

    body = [row(fix) for fix in enough[:6]]
    if short:
        body += [["not enough alone:", "", "", "", "", ""], *(row(fix) for fix in short[:5])]
    lines = render.table(columns, body, term).splitlines()
    title = "What would fit, fewest GPUs first" if enough else "Nothing tried is enough"
    lines = [title, "", *lines]
    if any(fix.alters_answers for fix in (*enough[:6], *short[:5])):
        lines.append("  ~ changes what the model answers; kvplan does not judge that")
    return "\n".join(lines)


def next_command(words: Sequence[str], enough: Sequence[Fix]) -> str | None:
    """The line to try next: the first fix that leaves the answers alone, else the first."""
    if not enough:
        return None
    fix = next((f for f in enough if not f.alters_answers), enough[0])
    return shell_lines(["kvplan", "estimate", *words, *fix.arguments], "Next: ")


def shell_lines(words: Sequence[str], lead: str, width: int = 80) -> str:
    """A command to copy, each flag beside its value, on lines of at most ``width`` joined by backslashes."""
    pieces: list[str] = []
    for k, word in enumerate(words):
        text = shlex.quote(word)
        if k and not word.startswith("-") and words[k - 1].startswith("-"):
            pieces[-1] += f" {text}"
        else:
            pieces.append(text)
    lines = [lead.rstrip(" ") if lead.strip() else ""]
    for piece in pieces:
        start = f"{lines[-1]} " if lines[-1].strip() else (lead if not lines[-1] else lines[-1])
        if len(start) + len(piece) + 2 <= width or not lines[-1].strip():
            lines[-1] = start + piece
        else:
            lines[-1] += " \\"
            lines.append(" " * 4 + piece)
    return "\n".join(lines)
