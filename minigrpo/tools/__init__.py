"""The commands: `minigrpo NAME` calls the function NAME_command of a module in this folder."""
