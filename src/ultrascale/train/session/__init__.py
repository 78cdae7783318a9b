"""One session of a run: from its start, or from where it stopped, to its end or a stop signal.

begin              joined processes with the run's folder, store and kernels; everything built and restored; observers of
                   the loop (`train.observers`, `start`, `folder` and `watch` have others)
moments            a session's state, and the moments of the loop at which observers are called
"""
