"""The command line. Each command parses its options, calls a verb of `opdcl.api`, and prints the outcome.

Nothing heavy is imported before a command needs it, so that `opdcl --help` answers at once.
"""

from __future__ import annotations

import os
import re
import sys
from typing import Annotated, Any

import typer

from opdcl import parallel
from opdcl.cli import runs, screen, stages
from opdcl.cli.config import config_app, init, suites_app, workflows_app
from opdcl.cli.options import TwoLists, describe_commands, hint_for
from opdcl.console import silence
from opdcl.errors import EnvironmentFault, Interrupted, OpdclError, UsageError, typed
from opdcl.faults import translate
from opdcl.parallel import as_interrupts
from opdcl.sanitize import redact
from opdcl.version import __version__

app = typer.Typer(
    cls=TwoLists,
    help="Fine-tune a model on a domain, recover what it forgot, and measure both.\n\n"
    "\b\nBegin with: opdcl run quickstart\nYour rows:  opdcl finetune rows.jsonl -o runs/mine\n"
    "An adapter: opdcl recover my-adapter --domain rows.jsonl -o runs/fixed",
    epilog="`opdcl COMMAND --help` shows options and an example. Exit codes: 0 done; 1 failed; 2 wrong "
    "command, settings or data; 3 gate missed; 4 not on this machine; 5 gate undecided; 130 interrupted.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
app.command(name="eval")(stages.evaluate)
_verbs = (init, stages.run, stages.finetune, stages.recover, runs.report, runs.ls, runs.compare, runs.chat)
for _verb in (*_verbs, runs.export, runs.verify, runs.clean, runs.doctor):
    app.command()(_verb)
# What follows -- belongs to vLLM.
app.command(context_settings={"allow_extra_args": True, "ignore_unknown_options": True})(runs.serve)
describe_commands(app)
app.add_typer(workflows_app, name="workflows")
app.add_typer(suites_app, name="suites")
app.add_typer(config_app, name="config")


@app.command(name="help", hidden=True)
def _help(words: Annotated[list[str] | None, typer.Argument()] = None) -> None:
    """Show the help of opdcl or of one command."""
    raise typer.Exit(app([*(words or ()), "--help"], prog_name="opdcl", standalone_mode=False))


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False) -> None:
    if version:
        print(__version__)
        raise typer.Exit


def main() -> None:
    """Run the command line. A failure prints a message and a hint, not a traceback, and has an exit code."""
    screen.prepare()
    screen.reset()
    stdout = sys.stdout
    try:
        if sys.flags.optimize > 1:  # transformers reads docstrings when it is imported
            raise EnvironmentFault("opdcl does not run without docstrings", "unset PYTHONOPTIMIZE; drop -OO")
        with as_interrupts():
            # In this mode Typer returns the code of `typer.Exit` instead of exiting.
            code = app(prog_name="opdcl", standalone_mode=False)
        if code == Interrupted.exit_code:  # Typer has taken Ctrl-C for itself, without a word
            raise KeyboardInterrupt
    except (KeyboardInterrupt, typer.Abort):
        code = _fail(Interrupted("interrupted", redact(typed("opdcl", *sys.argv[1:]))))
    except OpdclError as fault:
        code = _fail(fault)
    except BrokenPipeError as fault:
        code = 0 if screen.reader_is_gone() else _fail_unexpectedly(fault)
        if not code:
            silence(1)
    except SystemExit:
        raise
    except BaseException as fault:  # a library written in Rust panics with one that is no Exception
        code = _fail_unexpectedly(fault)
    finally:
        sys.stdout = stdout
    sys.exit(code)


def _fail(fault: OpdclError) -> int:
    screen.output.error(fault)
    return fault.exit_code


def _fail_unexpectedly(fault: Any) -> int:
    """Report an exception that is not opdcl's own: a wrong option, or a failure of machine or library."""
    if os.environ.get("OPDCL_DEBUG"):
        raise fault
    if type(fault).__name__ == "NoArgsIsHelpError":
        print(fault.format_message())
        return 0
    if hasattr(fault, "format_message"):  # Typer's complaint about an argument or an option
        # The parser's own guess is left out: the hint has a better one.
        message = re.split(r" \(Possible| Did you mean|, unable to", fault.format_message())[0]
        message = message.replace("Input should be a valid", "it must be a")
        return _fail(UsageError(message, hint_for(fault)))
    try:
        known = translate(fault, parallel.worker_count())
        if parallel.rank():  # the failure of one worker, which no other worker reports
            known.message = f"worker {parallel.rank()}: {known.message}"
        screen.output.error(known, from_any_worker=True)
    except MemoryError:  # not even for a message is there memory
        os.write(2, b"error: out of memory\nhint: use smaller batches, or another machine\n")
        return 1
    return known.exit_code
