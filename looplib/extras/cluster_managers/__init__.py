"""Cluster managers: the processes of a run, from the variables of Slurm and Kubernetes.

Names that other rooms may use, by file:
    environments: read_cluster
"""
