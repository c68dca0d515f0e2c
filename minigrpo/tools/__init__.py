"""The commands: `minigrpo NAME` runs `main` of the module NAME in this folder."""
