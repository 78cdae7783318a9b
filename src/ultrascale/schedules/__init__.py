"""What runs when, as data: one pure function a schedule. The trainer executes the lists, the planner replays them."""
