"""The machine: devices, processes, files, signals, the allocator, schedulers."""
