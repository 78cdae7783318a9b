"""A step under the profiler.

step_report        planned beside measured: begin here
waterfall, spans   every moment in one category; stretches of time
categories, profile_events   names in a profiler's trace
"""
