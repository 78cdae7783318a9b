"""Plan, prove, train and measure the pretraining of large language models."""

__version__ = "0.1.0"
