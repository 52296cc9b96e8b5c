"""Both halves' pure rooms in discrete steps over a plant."""
