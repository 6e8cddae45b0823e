"""Lets `python -m opdcl` be the command too."""

from opdcl.cli import main

if __name__ == "__main__":
    main()
