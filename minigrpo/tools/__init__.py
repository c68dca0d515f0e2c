"""What people run on a run: `python -m minigrpo.tools.NAME`."""
