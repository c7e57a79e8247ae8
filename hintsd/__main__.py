"""`python -m hintsd` is the command `hintsd`."""

from hintsd.cli.main import main

if __name__ == "__main__":
    main()
