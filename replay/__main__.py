"""`python -m replay` is the command `replay`."""

import sys

try:
    from replay.cli.start import main
except ModuleNotFoundError as error:  # a checkout's folder `replay/` has not all rooms, and python -m looks there first
    if not (error.name or "").startswith("replay."):
        raise
    sys.exit("replay: this folder hides the installed replay; type `replay`, or python -m replay in another folder")

if __name__ == "__main__":
    main()
