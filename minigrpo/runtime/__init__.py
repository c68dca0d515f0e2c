"""What surrounds training: devices, processes, the run's folder, logs, statistics."""
