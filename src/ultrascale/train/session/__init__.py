"""One stretch of a run, from its start, or from where it stopped, to its end or a signal.

begin              processes that have met, with the run's folder, store and kernels; everything built and restored; observers
                   of the loop (`train.observers`, `start`, `folder` and `watch` have others)
moments            a session's state, and the moments of the loop that observers are told of
"""
