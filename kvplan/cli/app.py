"""The entry point: help that starts at once, commands imported when asked for, errors as one line."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import Any

import typer
import typer.core

from kvplan import __version__
from kvplan.errors import InputError

# Command: the module that holds its Typer app, the name of that app, its line in --help.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "estimate": ("kvplan.cli.estimate", "app", "Does it fit, how many tokens and requests, what to change"),
    "simulate": ("kvplan.cli.simulate", "app", "Replay a trace: KV use, sharing, preemption, latency"),
    "bench": ("kvplan.cli.bench", "app", "Measure paged attention on this machine"),
    "validate": ("kvplan.cli.validate", "app", "Our error against public engine logs"),
    "trace": ("kvplan.cli.trace", "app", "Inspect, convert or generate request traces"),
    "calibrate": ("kvplan.cli.calibrate", "app", "Fit the step times to a bench file"),
    "models": ("kvplan.cli.catalog", "models_app", "The models known, with source"),
    "gpus": ("kvplan.cli.catalog", "gpus_app", "The GPUs known, with source"),
    "warmup": ("kvplan.cli.simulate", "warmup_app", "Compile the scheduler now, for images"),
}

HELP = """\
Usage: kvplan COMMAND [OPTIONS]

Plan and measure LLM serving with a paged KV cache.

{commands}

Examples
  kvplan estimate llama-3.3-70b-fp8 --gpu h100 -tp 2
  kvplan simulate trace.jsonl --model qwen3-14b --gpu h100 --block-size 16
  kvplan bench --block-size 16 --block-size 64

Options  --version  --install-completion  -h, --help
Flags are vLLM's where vLLM has one. `kvplan COMMAND -h` lists them.
"""

# Typer carries its own copy of click since 0.20; the class that all usage errors share is found here.
UsageErrorBase: type[Exception] = typer.BadParameter.__mro__[2]


class LazyGroup(typer.core.TyperGroup):
    """A group that imports a command's module only when that command is called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[cmd_name]
        command = typer.main.get_command(getattr(importlib.import_module(module), attribute))
        command.name = cmd_name
        return command

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in COMMANDS and not args[0].startswith("-"):
            near = difflib.get_close_matches(args[0], COMMANDS, n=1)
            meant = f" Did you mean {near[0]}?" if near else ""
            ctx.fail(f"no command {args[0]!r}.{meant}")
        return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        # Written to the stream itself: the formatter of Typer would re-wrap the table.
        lines = "\n".join(f"  {name:<9}  {line}" for name, (_, _, line) in COMMANDS.items())
        formatter.write(HELP.format(commands=lines))


app = typer.Typer(
    cls=LazyGroup,
    add_completion=True,
    no_args_is_help=True,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        sys.stdout.write(f"kvplan {__version__}\n")
        raise typer.Exit


@app.callback()
def _root(
    version: bool = typer.Option(False, "--version", callback=_print_version, is_eager=True),
) -> None:
    pass


def main(argv: list[str] | None = None) -> int:
    """Run one command; the return value is the exit code (0 fine, 1 answer is no, 2 bad input, 130)."""
    try:
        code = typer.main.get_command(app)(args=argv, prog_name="kvplan", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except InputError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    except UsageErrorBase as error:
        return _usage_error(error)
    except (KeyboardInterrupt, typer.Abort):
        sys.stderr.write("interrupted\n")
        return 130
    except BrokenPipeError:
        # The reader (head, less) is gone: point stdout at nothing so that the exit flush stays quiet.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def _usage_error(error: Any) -> int:
    """Print click's usage errors like our own: one line, then where to look."""
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if type(error).__name__ == "NoArgsIsHelpError":  # no arguments at all: its message is the help text
        sys.stdout.write(message.rstrip() + "\n")
        return 0
    context = getattr(error, "ctx", None)
    where = context.command_path if context is not None else "kvplan"
    sys.stderr.write(f"error: {' '.join(message.split())}\n  See: {where} --help\n")
    return 2


def entry() -> None:
    """Console-script entry point."""
    sys.exit(main())
