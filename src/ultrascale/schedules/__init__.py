"""What runs when, as data. The trainer executes these lists of actions and the planner replays the same ones."""
