"""A run that is stopped, hangs or dies: noticed, said, and left in order.

deadline           told to stop; before the job's time is over
signs_of_life      for the watchdog; parts that may take long
out_of_memory, traced_rank   what was planned, traced and measured of a rank without memory
"""
