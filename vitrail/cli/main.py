"""The command `vitrail`: assembles the commands, runs one and returns its exit code."""

from vitrail import interrupts  # first: handles Ctrl-C during the following imports

# isort: split
import contextlib
import errno
import io
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from vitrail.cli.annotate import annotate, store
from vitrail.cli.bench import bench
from vitrail.cli.compare import ablate, compare
from vitrail.cli.console import print_message
from vitrail.cli.data import data
from vitrail.cli.delta import delta
from vitrail.cli.demo import demo
from vitrail.cli.embed import embed, suite
from vitrail.cli.evaluate import disagree, evaluate
from vitrail.cli.explain import explain
from vitrail.cli.explore import explore
from vitrail.cli.export import export
from vitrail.cli.models import convert, info, models
from vitrail.cli.predict import predict
from vitrail.cli.probe_levels import probe
from vitrail.cli.push import push
from vitrail.cli.recipes import recipes
from vitrail.cli.search import index, search
from vitrail.cli.segment import segment
from vitrail.cli.serve import serve
from vitrail.cli.tokenizer import tokenizer
from vitrail.cli.train import plan, replay, resume, train
from vitrail.errors import UserError
from vitrail.version import __version__

# The panels of `vitrail --help`, in this order.
PANELS: dict[str, dict[str, typer.Typer | Callable[..., None]]] = {
    "Train": {
        "demo": demo,
        "train": train,
        "resume": resume,
        "plan": plan,
        "recipes": recipes,
        "compare": compare,
        "ablate": ablate,
        "replay": replay,
        "tokenizer": tokenizer,
    },
    "Evaluate": {
        "predict": predict,
        "segment": segment,
        "evaluate": evaluate,
        "explain": explain,
        "disagree": disagree,
        "embed": embed,
        "probe": probe,
        "suite": suite,
        "explore": explore,
        "index": index,
        "search": search,
    },
    "Models": {"models": models, "info": info, "convert": convert, "delta": delta},
    "Data": {"data": data, "annotate": annotate, "store": store},
    "Deploy": {"export": export, "serve": serve, "push": push, "bench": bench},
}
ORDER = [name for commands in PANELS.values() for name in commands]


class Commands(TyperGroup):
    """Lists commands in the order of the panels and carries interrupts through typer."""

    def list_commands(self, ctx: Any) -> list[str]:
        names = super().list_commands(ctx)
        return sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        simplify_types(self)
        with convert_interrupts():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        with convert_interrupts():
            return super().invoke(ctx)


@contextlib.contextmanager
def convert_interrupts() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as interrupt:
        raise interrupts.CommandInterrupted(str(interrupt) or "Stopped.") from None


TYPES = {
    "<bool>": None,
    "<int range>": "<int>",
    "<float range>": "<float>",
    "<list[str]>": "<str>",
    "<list[Path]>": "<path>",
    "<list[float]>": "<float>",
}


def simplify_types(command: Any) -> None:
    """Let the help of a command and of its subcommands show no type for flags, and plain ones for ranges and lists."""
    context = command.context_class(command)
    for parameter in command.get_params(context):  # with --help
        if hasattr(parameter, "display_type_rich"):  # of typer 0.2x; earlier versions show TEXT, and nothing for flags
            text = parameter.display_type_rich(context)
            parameter.display_type_rich = lambda ctx, text=text: TYPES.get(text, text)
    for subcommand in getattr(command, "commands", {}).values():
        simplify_types(subcommand)


app = typer.Typer(
    cls=Commands, no_args_is_help=True, add_completion=False, rich_markup_mode="rich", pretty_exceptions_enable=False
)
for panel, commands in PANELS.items():
    for name, command in commands.items():
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=name, rich_help_panel=panel)
        else:
            app.command(name, rich_help_panel=panel)(command)


def print_version(requested: bool) -> None:
    if requested:
        print(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version.")] = False,
) -> None:
    """Train, distill, adapt, evaluate, interpret and deploy vision transformers.

    Start with [bold]vitrail demo[/bold], then train on a folder with one subfolder per class: [bold]vitrail train photos/[/bold]
    """


def main() -> None:
    """Run the command of `sys.argv` and exit; a UserError becomes one message on standard error and exit code 2."""
    limit_openmp_spinning()
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error: any name can be printed on any terminal
    code = run_interruptible()
    interrupts.State.finished = True
    if "RANK" in os.environ:
        # Threads of torch's process group may outlive it, and the interpreter's shutdown then aborts the process.
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def limit_openmp_spinning() -> None:
    """Limit how long OpenMP threads spin while they wait; called before torch is imported, which reads the variable.

    GNU OpenMP, used by torch's CPU builds, spins for milliseconds unless threads outnumber the cores. If other programs occupy
    the cores, steps take up to thirty times as long. 1000 is the library's own value for more threads than cores.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "1000")


def run_interruptible() -> int:
    """Run the command and return its exit code; an interrupt becomes one message and exit code 130."""
    interrupts.start_command()
    try:
        code = run()
        interrupts.State.exiting = code == interrupts.EXIT_CODE  # the command has reported the interrupt itself
        return code
    except (KeyboardInterrupt, interrupts.CommandInterrupted) as interrupt:
        return interrupts.report_interrupt(str(interrupt) or "Stopped.")
    except Exception:
        if not interrupts.State.interrupted:
            raise
        return interrupts.report_interrupt("Stopped.")  # a library converted the interrupt to another exception
    finally:
        interrupts.remove_handler()


def run() -> int:
    """Run the command and return its exit code; errors that the user can fix are printed without a traceback."""
    try:
        reject_empty_arguments(sys.argv[1:])
        app()
    except UserError as error:
        if reports_errors(error.report_here):
            print_message(str(error))
        return 2
    except BrokenPipeError:
        return 0
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            print_message(f"{error.filename} cannot be opened: its name is too long.")
            return 2
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        with contextlib.suppress(OSError):
            sys.stdout.close()  # otherwise the interpreter writes the rest again at exit
        print("The disk is full: free disk space, or write elsewhere.", file=sys.stderr)
        return 2
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def reject_empty_arguments(arguments: Sequence[str]) -> None:
    """Raise UserError for empty arguments, as from unset shell variables: an empty path would be the current folder."""
    for place, argument in enumerate(arguments):
        option, equals, value = argument.partition("=") if argument.startswith("--") else ("", "=", argument)
        if value.strip() or not equals:
            continue
        previous = option or "".join(arguments[place - 1 : place])
        if previous.startswith("--"):
            raise UserError(f"{previous} is empty: give a value, or remove it.")
        typed = shlex.join(["vitrail", *arguments[:place]])
        raise UserError(f"The argument after `{typed}` is empty: give a value, or remove it.")


def reports_errors(report_here: bool | None) -> bool:
    """Whether this process prints errors; None: the first process of each machine does."""
    return os.environ.get("LOCAL_RANK", "0") == "0" if report_here is None else report_here


interrupts.remove_handler()  # importing this module must not change the signal handling of other programs

if __name__ == "__main__":
    main()
