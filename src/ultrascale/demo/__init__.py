"""A complete run on this machine in five minutes, from text to an exported model; each claim has a measured number."""
