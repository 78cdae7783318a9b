"""Text files to a folder of shards.

prepare            all of it, killed and given again: begin here
shards, workers    one shard; tasks over processes
inspect, verify    what a folder holds; whether it still does
"""
