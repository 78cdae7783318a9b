"""Text files to a folder of shards.

prepare            the whole preparation, restartable: begin here
shards, workers    one shard; tasks distributed over processes
inspect, verify    display and verification of a folder's content
"""
