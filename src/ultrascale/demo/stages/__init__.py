"""Stages of the demo: text, proof, interrupted training, a sample, the exported model."""
