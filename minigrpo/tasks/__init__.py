"""Tasks: where prompts come from, and how completions are scored. `base.load_task` makes one."""
