"""Words that both the simulator and the analysis say, neither of which may know the other."""

HEALTHY_NAME = "healthy"  # of the hypothesis that nothing is wrong
