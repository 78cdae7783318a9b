"""One rank of a run, traced without a cluster: the trainer's own code on the meta device, which has shapes and no memory."""
