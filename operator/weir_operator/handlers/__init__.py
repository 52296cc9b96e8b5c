"""kopf glue: events become keys in a queue, nothing else."""
