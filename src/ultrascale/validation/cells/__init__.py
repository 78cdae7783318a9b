"""Cells of a measured run: its model, machine, network, program, and the convention by which its FLOPs were counted.

programs, models, networks   one aspect of a row each
stated             statements in a source's text only
flops_conventions  FLOPs per token by the conventions of reports
"""
