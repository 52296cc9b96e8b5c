"""Messages between the HTTP parent and the engine child."""
