"""The parent process: routes, streams, auth, admission to the queue, knobs and leases, metrics. Never imports torch."""
