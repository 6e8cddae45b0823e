"""`python -m opdcl` runs the command line."""

from opdcl.cli import main

if __name__ == "__main__":
    main()
