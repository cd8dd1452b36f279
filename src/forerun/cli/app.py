"""The command `forerun`: its sub-commands, and what happens when one fails.

Knows: which commands there are and how errors, Ctrl-C and a closed pipe end them. Does not know: what they do.
Nothing heavy is imported here: every command imports torch and the engine when it runs.
"""

from __future__ import annotations

import errno
import os
import shutil
import sys
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from forerun import __version__
from forerun.cli import (
    batch,
    bench,
    bench_drafters,
    bench_serve,
    chat,
    curve,
    demo,
    deploy,
    generate,
    hub,
    inspect,
    learned,
    perplexity,
    quantize,
    serve,
    verify,
)
from forerun.cli.console import print_error
from forerun.cli.groups import ungrouped
from forerun.cli.train import app as train_app
from forerun.errors import ForerunError

EXIT_USER_ERROR = 2
EXIT_INTERRUPTED = 130  # 128 + SIGINT, as in shells
EXIT_BROKEN_PIPE = 141  # 128 + SIGPIPE
WIDE = 100  # columns in which the help of every command is whole


ELSEWHERE = {  # options of vLLM and llama.cpp, where no name here is like theirs
    "--gpu-memory-utilization": "forerun takes what memory there is: docs/serving.md, Limits and memory",
    "--kv-cache-memory-bytes": "forerun takes what memory there is: docs/serving.md, Limits and memory",
    "--enable-prefix-caching": "it is on; --no-prefix-caching turns it off",
    "--enable-lora": "use --lora NAME=PATH", "--lora-modules": "use --lora NAME=PATH",
    "--enable-auto-tool-choice": "leave it out; --tool-parser is auto unless given",
    "--swap-space": "use --kv-host-gib",
    "--quantization": "leave it out; the checkpoint says it",
    "--trust-remote-code": "code of a checkpoint is never run",
    "-c": "llama.cpp's is --max-model-len here", "-n": "llama.cpp's -n is --max-tokens here, -ngl --device cuda",
    "-p": "the prompt is an argument: forerun generate MODEL PROMPT",
    "--n-predict": "use --max-tokens", "--ctx-size": "use --max-model-len", "--n-gpu-layers": "use --device cuda",
}  # fmt: skip


class CleanGroup(TyperGroup):
    """Turns errors that users can cause into one line and an exit status; others keep their traceback."""

    def invoke(self, ctx: Any) -> Any:
        """Run the chosen command."""
        try:
            return super().invoke(ctx)
        except ForerunError as error:
            print_error(str(error))
            raise typer.Exit(EXIT_USER_ERROR) from error
        except KeyboardInterrupt as error:
            print_error("interrupted")
            raise typer.Exit(EXIT_INTERRUPTED) from error
        except BrokenPipeError as error:
            _drop_stdout()
            raise typer.Exit(EXIT_BROKEN_PIPE) from error
        except OSError as error:
            if error.filename is None and error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise  # not about a user's file
            _drop_stdout_if_full()
            print_error(
                f"{error.filename or 'output'}: {error.strerror}; choose another path, or check its permissions and "
                "free space"
            )
            raise typer.Exit(EXIT_USER_ERROR) from error
        except Exception as error:  # usage errors of click, of which typer may have a copy of its own
            _add_hint(error)
            raise


def _add_hint(error: Any) -> None:
    """Say more of an argument or an option that a command does not know; other errors stay as they are."""
    name, command = getattr(error, "option_name", None), getattr(getattr(error, "ctx", None), "command", None)
    if command is None:
        return
    if name in ELSEWHERE:
        error.message, error.possibilities = f"No such option: {name} ({ELSEWHERE[name]})", None
    elif name is not None:
        begun = [option for param in command.params for option in param.opts if option.startswith(name)]
        error.possibilities = begun or error.possibilities
    elif command.name == "chat" and "unexpected extra argument" in str(getattr(error, "message", "")):
        error.message += "; for a single question use `forerun generate MODEL QUESTION`"


def _drop_stdout_if_full() -> None:
    try:
        sys.stdout.flush()
    except OSError:
        _drop_stdout()


def _drop_stdout() -> None:
    """Discard buffered output, so that the interpreter does not complain when it ends."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


app = typer.Typer(
    name="forerun",
    cls=CleanGroup,
    help="Run open language models faster, with the same output: lossless speculative decoding.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    # The boxes of rich cut long names of options in narrow terminals; click's plain lists never do.
    rich_markup_mode="rich" if shutil.get_terminal_size().columns >= WIDE else None,
    context_settings={"help_option_names": ["-h", "--help"]},
)
bench_app = typer.Typer(help="Measure drafters, passes, prompts and servers.", no_args_is_help=True)
bench_app.command("speed")(ungrouped(bench.speed))
bench_app.command("drafters")(ungrouped(bench_drafters.drafters))
bench_app.command("serve")(ungrouped(bench_serve.bench_serve))
bench_app.command("curve")(ungrouped(curve.curve))
bench_app.command("prefill")(ungrouped(curve.prefill))

app.command("demo")(ungrouped(demo.demo))
app.command("run")(ungrouped(hub.run))
app.command("pull")(ungrouped(hub.pull))
app.command("list")(ungrouped(hub.list_models))
app.command("rm")(ungrouped(hub.rm))
app.command("learned")(ungrouped(learned.learned))
app.command("generate")(ungrouped(generate.generate))
app.command("chat")(ungrouped(chat.chat))
app.command("serve")(ungrouped(serve.serve))
app.command("deploy")(ungrouped(deploy.deploy))
app.command("batch")(ungrouped(batch.batch))
app.add_typer(bench_app, name="bench")
app.command("verify")(ungrouped(verify.verify))
app.command("inspect")(ungrouped(inspect.inspect))
app.command("quantize")(ungrouped(quantize.quantize))
app.command("perplexity")(ungrouped(perplexity.perplexity))
app.add_typer(train_app, name="train")


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"forerun {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Run open language models faster, with the same output: lossless speculative decoding."""


def main() -> None:
    """The entry point of the installed command `forerun`."""
    app()
