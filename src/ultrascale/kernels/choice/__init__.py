"""Choice of kernels.

implementation, device_kind   by name and by device
contest, fused_contest   by measured time, at a run's shapes
"""
