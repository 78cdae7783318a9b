from train.conftest import home

__all__ = ["home"]
