"""Small kernels that show strengths and weaknesses of a GPU, run on the user's own."""
