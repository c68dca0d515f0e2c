"""The folder of a run: what is written into it, what is read from it, and what people see."""
