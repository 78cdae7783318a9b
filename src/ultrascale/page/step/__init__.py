"""A planned step as the page draws it.

ranks      memory by category on each rank of the pipeline
sent       messages of a rank by axis
roofline   operations against the device's two bounds, FLOPs and memory traffic
"""
