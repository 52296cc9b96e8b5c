"""Chat templates, tokenizers, incremental detokenising, stop strings: pure text, no torch, no HTTP."""
