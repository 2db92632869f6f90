"""``ibaml`` and ``python -m ibaml``"""

import sys
import threading


def main() -> None:
    """Run the command line. Ctrl-C ends it with a sentence, also while libraries are imported."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a file's name may hold what the terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    threading.excepthook = _in_a_thread
    try:
        from ibaml.cli import app

        app()
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        sys.exit(130)


def _in_a_thread(what: threading.ExceptHookArgs) -> None:
    """What a library's own thread could not write (TensorBoard's, on a full disk) is a sentence."""
    if isinstance(what.exc_value, OSError):
        print(f"Error: {what.exc_value}", file=sys.stderr)
    else:
        threading.__excepthook__(what)


if __name__ == "__main__":
    main()
