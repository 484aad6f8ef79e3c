"""The east wing: replicas without redundancy."""
