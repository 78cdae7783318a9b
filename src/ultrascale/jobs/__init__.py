"""Runs as jobs of a cluster: scripts for Slurm, Kubernetes, SkyPilot, torchrun and ssh, and the programs that they call on the
nodes.

job                  a run, its nodes and its time limit, checked before anything is written. Begin here
environment          environment variables of every rank, each with its reason
text                 the package's templates, filled in
slurm, kubernetes,
skypilot, hosts      a script for each launcher
submit               the launcher's own command
state, alive         called by jobs: state of a run; liveness of ranks on this machine

The scripts are complete and can be edited: nothing reads them again. `templates` has one for each launcher, with `@{name}` as a
placeholder.
"""
