"""The page of `minigrpo report`: its figures, its words, its samples, and the template."""
