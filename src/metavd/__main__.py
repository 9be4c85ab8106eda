"""Run the command line with `python -m metavd`."""

from .cli import main

main()
