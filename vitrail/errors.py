"""The one exception that is meant for the person at the keyboard."""


class UserError(Exception):
    """A sentence that says what is wrong and what to do; the command line prints it alone and exits with 2."""

    # Of several processes in the same trouble one tells it; None: they have not met, and the first of each machine does.
    report_here: bool | None = None
