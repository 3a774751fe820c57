"""`python -m moebius`: the same as the `moebius` command."""

from moebius.app.cli import main

if __name__ == "__main__":
    main()
