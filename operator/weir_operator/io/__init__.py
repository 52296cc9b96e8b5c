"""Everything that touches the world: the one writer to the Kubernetes API, scraping, local processes."""
