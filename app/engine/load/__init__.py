"""From settings to a warm engine: dtype and sizes, refusals, weights, memory, a self-test and the times of steps.
What config.json and the headers of weights say is read in engine/checkpoint, and the limits of a device are in its
folder. Nothing here runs once the engine serves."""
