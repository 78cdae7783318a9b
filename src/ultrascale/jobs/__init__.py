"""Runs as jobs of a cluster: texts for Slurm, Kubernetes, SkyPilot, torchrun and ssh, and what they call on the nodes.

job                  a run, its nodes and its time, checked before anything is written. Begin here
environment          the variables of every rank, each with its reason
text                 templates of the package filled in
slurm, kubernetes,
skypilot, hosts      a text for each launcher
submit               the launcher's own command
state, alive         called by jobs: what became of a run; whether ranks on this machine get on

The texts are complete and can be edited: nothing reads them again. `templates` has one for each launcher, with `@{name}` where
something is filled in.
"""
