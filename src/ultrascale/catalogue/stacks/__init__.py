"""Training frameworks that can be planned for, one TOML file each.

stack              settings of a framework
stack_files        reader of the files
"""
