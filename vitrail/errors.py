"""The exception for errors that the user can fix."""


class UserError(Exception):
    """A message that states the problem and what to do; the command line prints it without a traceback and exits with 2."""

    # Whether this process prints the error; None: the processes did not agree, and the first of each machine prints it.
    report_here: bool | None = None
