"""A request's life: scheduling, the step loop, and the fronts over it."""
