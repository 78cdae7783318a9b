"""Runs that are stopped, hang or crash: detection, reports, and an orderly exit.

deadline           stop signals; exit before the job's time limit
signs_of_life      for the watchdog; phases that may take long
out_of_memory, traced_rank   planned, traced and measured memory of a rank that ran out of it
"""
