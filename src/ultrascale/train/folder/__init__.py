"""The folder a run lives in.

run_folder         its files; facts: the JSON beside a checkpoint's tensors
differences        between facts kept by any release and those of now
resume, saves      what a checkpoint holds and going on from it; what is done when one cannot be written
export             the newest checkpoint as a Hugging Face folder
lost_folder        a folder that is removed while the run trains
"""
