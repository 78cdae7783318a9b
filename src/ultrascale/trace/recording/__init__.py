"""Recording of a rank on the meta device, operation by operation as it is dispatched.

recorder, record   every operation, allocation and free; the data of a trace
recipes            reuse of result shapes of earlier operations
pretend            simulates one rank of many
flops              FLOPs of operations, by their shapes
"""
