"""Recording of a rank on the meta device, operation by operation as it is dispatched.

recorder, record   every operation, storages as they come and go; what a trace is
recipes            results seen before
pretend            a rank of many
flops              of operations, by their shapes
"""
