"""The errors a user can meet: each says what is wrong and what to type next."""

from __future__ import annotations


class OpdclError(Exception):
    """A failure with a remedy. `exit_code` is the process exit code it maps to."""

    exit_code = 1

    def __init__(self, message: str, hint: str = ""):
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(OpdclError):
    """The command, the configuration or the data is wrong; nothing was started."""

    exit_code = 2


class GateError(OpdclError):
    """Everything ran, and a required score was not met."""

    exit_code = 3


class EnvironmentFault(OpdclError):
    """This machine cannot run it: a model, a package or memory is missing."""

    exit_code = 4


class Interrupted(OpdclError):
    """The user stopped the run; the checkpoint is saved."""

    exit_code = 130
