"""The five-minute story: a real run on this machine, from text to an exported model, each claim with its number."""
