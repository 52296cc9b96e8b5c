"""The reconcile loop, the tuner loop, the lease."""
