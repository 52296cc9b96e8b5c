"""Pure: spec and observation in, manifests and status out."""
