"""`python -m vitrail.cli.child_process WORDS`: a command that stops in good order when the one that started it is gone.

The other end of standard input is held by the starting process and never written to. It closes however that process ends, and a
training then saves its state and leaves, as after Ctrl-C.
"""

import os
import signal
import sys
import threading


def attend() -> None:
    def wait() -> None:
        while os.read(0, 1):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    # Nothing but a system call, and no lock: loading processes may be forked off beside it.
    threading.Thread(target=wait, daemon=True).start()


if __name__ == "__main__":
    from vitrail.cli.main import main

    attend()
    sys.argv[0] = "vitrail"  # what run.json has as the command that one would type
    main()
