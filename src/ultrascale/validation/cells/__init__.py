"""Cells of a measured run: its model, machine, network, program, and the convention by which its FLOPs were counted.

programs, models, networks   one question each
stated             what a source states in its text alone
flops_conventions  FLOPs per token as reports count them
"""
