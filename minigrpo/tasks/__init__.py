"""Tasks: where prompts come from, and how completions are scored. `loading.load_task` makes one."""
