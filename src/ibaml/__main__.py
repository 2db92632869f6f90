"""``ibaml`` and ``python -m ibaml``"""

import sys


def main() -> None:
    """Run the command line. Ctrl-C ends it with a sentence, also while libraries are imported."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):  # a file's name may hold what the terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    try:
        from ibaml.cli import app

        app()
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
