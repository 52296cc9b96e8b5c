"""`weir-operator local`: manifests as processes on this machine, and the small API through which the plugin asks them."""
