"""Choice of kernels.

implementation, device_kind   by name and by device
contest, fused_contest   by time, at a run's shapes
"""
