"""Model files, the decoder, the sampler."""
