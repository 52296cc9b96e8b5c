"""Pure scheduling decisions: which rows run in the next step, who is admitted, who gives way."""
