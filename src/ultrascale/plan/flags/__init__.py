"""A plan as the complete, editable settings of the framework it was made for, with that framework's own names.

trainers     the writer of each framework, and choices without a setting; begin here
written      the plan to write, its TOML, YAML and shell, and the list of what a file lacks of the model
ours         [layout] and [batch] of a run's TOML
megatron, megatron_model  a shell script with Megatron-LM's arguments: layout, model
torchtitan   TOML, and a registered function for the releases that have no TOML
nanotron, llm_foundry, deepspeed  YAML, YAML, JSON

Values that a plan does not decide (data, tokenizer, learning rate) are in each file too, as placeholders, and marked. Names are
those of one release, which the file states; `tests/plan/release_names.toml` has that release's names.
"""
