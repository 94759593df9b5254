"""One training step: plan, rows, transforms, objectives, parameters beside the rows, and the step."""
