"""Trainers that can be planned for, one TOML file each.

stack              what there is to say of a trainer
stack_files        the files, read
"""
