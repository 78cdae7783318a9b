"""A plan as the complete, editable settings of the trainer it was made for, under that trainer's own names.

trainers     what is written for whom, and what a trainer has no setting for; begin here
written      what is written down, and TOML, YAML and shell of it
ours         [layout] and [batch] of a run's TOML
megatron     a shell script with Megatron-LM's arguments
torchtitan   TOML, and a registered function for the releases that have no TOML
nanotron, llm_foundry, deepspeed  YAML, YAML, JSON

What a plan does not decide (data, tokenizer, learning rate) is in each file too, with a value to change, and marked so. Names
are those of one release, which the file says; `tests/plan/release_names.toml` has that release's names.
"""
