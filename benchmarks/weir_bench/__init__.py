"""What the figures are measured with: an open-loop load generator, goodput accounting, plots, and the demo."""
