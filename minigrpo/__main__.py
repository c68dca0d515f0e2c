"""Makes `python -m minigrpo` the same as the command `minigrpo`."""

from .tools.cli import main

if __name__ == "__main__":
    main()
