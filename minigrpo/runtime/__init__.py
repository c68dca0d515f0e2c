"""What every run stands on: device, processes, optimizer, guard, random numbers, threads."""
