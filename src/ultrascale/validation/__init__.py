"""Predictions for published runs, and their errors. Uses the planner, which does not import this package."""
