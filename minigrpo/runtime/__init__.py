"""What every run stands on: device, processes, threads, signals, and calls that hang."""
