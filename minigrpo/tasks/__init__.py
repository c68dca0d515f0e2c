"""Tasks: where prompts come from, and what completions are scored against.

`registry` turns --task and --data into a task. The tasks are `chess_env` (write the position after
a move), `best_move` (write what an engine would play), `pairs` (prompts and answers from JSONL
files) and `mixed` (chess questions of both kinds in one batch). Their examples come from
`self_play` or from files: `games` reads PGN, `lines` reads text and JSONL, `files` holds what they
share.
`transitions` and `fen` implement the rules of chess, `splits` decides what is held out, and
`scoring` is the base class of tasks that score a batch at once.

`confidence` asks any task's questions, and how sure each answer is (--confidence). `hidden_digit`
has questions whose chance of a right answer is known, and `qa` has questions with short answers.
"""
