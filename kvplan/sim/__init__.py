"""The modelled clock: what a step costs, and the run loop around the scheduler."""
