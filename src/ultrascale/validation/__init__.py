"""Predictions for measured runs of others, and how far off they are. Above the planner, which knows nothing of it."""
