"""What is trained, on what, cut how. Plain data: no torch, and nothing of ours but this package."""
