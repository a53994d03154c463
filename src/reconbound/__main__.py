"""The console script, and `python -m reconbound`: nothing is imported before a stop from the keyboard is one line.

While modules load, a stop ends the process on the spot: an interrupt that is raised within an import may be swallowed
by it, or leave a module half made. Once a command runs, it is an exception that the command answers.
"""

import io
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
    from reconbound.cli.app import run

    if ours:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a terminal without ± and ε shows question marks
        try:
            status = run()
            sys.stdout.flush()
        except OSError as error:  # the reader went away, or the disk is full
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit is quiet
            if not isinstance(error, BrokenPipeError):
                print(f"reconbound: cannot write: {error.strerror}", file=sys.stderr)
            status = 1
    except KeyboardInterrupt:  # between a command and the end
        _stopped(signal.SIGINT, None)
    if ours:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is said
    if status == 130:  # Python would end by the signal instead if it went through code that was run from text
        sys.stderr.flush()
        os._exit(130)
    sys.exit(status)


if __name__ == "__main__":
    main()
