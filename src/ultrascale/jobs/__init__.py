"""Runs as jobs of a cluster: texts for Slurm, Kubernetes, SkyPilot, torchrun and ssh, and the programs they call on the nodes.

job                  a run, its nodes and its time, checked before anything is written. Begin here
environment          the variables of every rank, each with its reason
text                 the package's templates, filled in
slurm, kubernetes,
skypilot, hosts      a text for each launcher
submit               the launcher's own command
state, alive         called by jobs: state of a run; liveness of ranks on this machine

The texts are complete and can be edited: nothing reads them again. `templates` has one for each launcher, with `@{name}` as a
placeholder.
"""
