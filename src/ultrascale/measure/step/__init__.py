"""Analysis of a profiled step.

step_report        planned against measured; begin here
waterfall, spans   assigns every moment to one category; time intervals, and a profiler's events
categories         categories of names in a profiler's trace
"""
