"""Stages of the story: text, proof, training that is interrupted, a sample, the exported model."""
