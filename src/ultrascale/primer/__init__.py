"""Small kernels that show what a GPU does well and badly, run on the user's own."""
