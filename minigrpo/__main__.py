"""`python -m minigrpo` is the command `minigrpo`."""

from .tools.cli import main

if __name__ == "__main__":
    main()
