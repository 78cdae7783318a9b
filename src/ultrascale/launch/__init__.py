"""Start and end of a run's processes.

local              processes on this machine, through torchrun's agent, restarted when one dies
watchdog           a separate process that detects when ranks stop giving signs of life
restarts           limit on restarts, and their cost
stopping, orphans  signals to a launcher; ranks whose launcher is gone
forked, warm       ranks that start in tenths of a second
scratch            temporary folders, removed later if their creator was killed
"""
