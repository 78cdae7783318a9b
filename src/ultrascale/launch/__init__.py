"""Starting the processes of a run, and ending them.

local              processes on this machine, through torchrun's agent, started again when one dies
watchdog           a process of its own that sees when ranks show no more signs of life
restarts           how often is started again, and what that cost
stopping, orphans  signals to a launcher; ranks whose launcher is gone
forked, warm       ranks that start in tenths of a second
scratch            temporary folders, swept away if whoever made them was killed
"""
