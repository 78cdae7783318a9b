"""Checkpoints in a store: publishing, finding, downloading and removing them.

    checkpoints/step-00000120.json                             index of every part of every file; its put publishes them
    checkpoints/step-00000120/SAVE/rank-00000.safetensors.00000-1a2b3c4d   a part: its index in the file, and its checksum
    checkpoints/newest.json                                    steps as last published, for listings that lag behind

A save's parts are written first, under a unique name (SAVE). Then `step-*.json` is put on the condition that it does not exist,
or still has the version that was last seen: this put publishes the checkpoint, or atomically replaces another of that step.
"""
