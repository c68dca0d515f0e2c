"""All that a run needs besides the algorithm. Each module can be read by itself.

settings    settings, flags, renamed, combinations, fast
hardware    accel, oom, distributed, guard, optim
data        rng, prefetch, pool, reward_calls, loss_arguments
the run     build, run_dir, folder, checkpoint, resume, environment, signals, failures
reports     logging, log_files, files, announce, estimate, flops
"""
