"""A step under the profiler.

step_report        planned beside measured: begin here
waterfall, spans   every moment in one category; stretches of time, and a profiler's events
categories         names in a profiler's trace
"""
