"""The program's first moments: `metavd` and `python -m metavd`."""

import sys


def main() -> None:
    """Load the command line and run it; Ctrl-C is a plain stop all the while."""
    try:
        from .cli import main as run  # noqa: PLC0415
    except KeyboardInterrupt:
        sys.exit("metavd: stopped")
    run()


if __name__ == "__main__":
    main()
