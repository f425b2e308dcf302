"""Names of the variables by which a launcher tells a rank what it is given."""

LAUNCHER = "PLANNER_LAUNCHER"
"""Names the process that ranks must not outlive."""

DEVICE = "PLANNER_DEVICE"
"""Names the type of device that ranks take."""

DEVICES = "PLANNER_DEVICES"
"""The numbers of this node's accelerators, one for each local rank, with commas between."""

BACKEND = "PLANNER_BACKEND"
"""Names another backend than the device's own (`planner.runtime.process.groups.staged`)."""

UNMODIFIED = "PLANNER_UNMODIFIED"
"""Set, the script is for one process and its model is taken over."""

TIMELINE_DIR = "PLANNER_TIMELINE"
"""Names the folder in which ranks record timelines; unset, they record none."""

LAUNCHED = "PLANNER_LAUNCHED_PLAN"
"""Environment variable: the plan file that `launch` was given; ranks follow it."""

PLAN = "PLANNER_PLAN"
"""Names the plan that ranks train by instead of the one that the script names."""

KERNELS = "PLANNER_KERNELS"
"""Names the kernels that blocks run, eager or compiled, instead of those of the plan."""
