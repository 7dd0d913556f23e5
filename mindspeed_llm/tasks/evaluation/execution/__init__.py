"""Running programs that a model has written, held off from the machine."""
