"""The console script, and `python -m reconbound`: nothing is imported before a stop from the keyboard is one line.

While modules load, a stop ends the process on the spot: an interrupt that is raised within an import may be swallowed
by it, or leave a module half made. Once a command runs, it is an exception that the command answers.
"""

import os
import signal
import sys


def _stopped(number: int, frame: object) -> None:
    os.write(2, b"\nreconbound: stopped\n")
    os._exit(130)


def main() -> None:
    """Run the command line."""
    ours = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # not one that was told to ignore it
    if ours:
        signal.signal(signal.SIGINT, _stopped)
    from reconbound.cli import app as cli

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        cli.main()
    except KeyboardInterrupt:  # between a command and the end
        _stopped(signal.SIGINT, None)
    except SystemExit as stop:
        if ours:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is said
        if stop.code == 130:  # Python would end by the signal instead if it went through code that was run from text
            sys.stderr.flush()
            os._exit(130)
        raise


if __name__ == "__main__":
    main()
