"""Recording of a rank on the meta device, operation by operation as it is dispatched.

recorder, record   every operation; what a trace is
storages, recipes  storages as they come and go; results seen before
pretend, routing   a rank of many; routing without values
flops              of operations, by their shapes
"""
